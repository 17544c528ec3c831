// exp and log of whole vectors, float and double: within 2 units in the last place, subnormals, infinities and NaN
// included. The polynomials are minimax fits (Remez) made for this file. (Not called math.h: it would hide the one of the
// C library.) Compiled once a target: see foreach_target.h.
#include "simd.h"
#if defined(MASKWISE_VECTOR_MATH_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_VECTOR_MATH_H
#else
#define MASKWISE_VECTOR_MATH_H
#endif

namespace maskwise::MASKWISE_TARGET {

// The constants that a type's exponent arithmetic needs.
template <class A>
struct MathOf;
template <>
struct MathOf<float> {
  // Adding it rounds to an integer, which then stands in the low bits of the sum.
  static constexpr float kRound = 0x1.8p23f;
  static constexpr int kShift = 23;
  static constexpr int32_t kOne = 0x3f800000;
  static constexpr int32_t kMantissa = 0x007fffff;
  static constexpr int32_t kSqrtHalf = 0x3f3504f3;
  static constexpr float kBias = 127.0f;
  // ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
  static constexpr float kLn2High = 0x1.62e4p-1f;
  static constexpr float kLn2Low = 1.428606820309417232e-6f;
  // Beyond these, exp is 0 or infinity.
  static constexpr float kExpMin = -104.0f, kExpMax = 89.0f;
  static constexpr float kMinNormal = 0x1p-126f, kToNormal = 0x1p24f, kToNormalExponent = 24.0f;
  // (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2, and (log((1+s)/(1-s)) - 2s) / s^3 in s^2.
  static constexpr float kExp[] = {0.49999993448042645f, 0.16666520632473031f, 0.041668387996961436f,
                                   0.0083687168087027443f, 0.0013814600943026782f};
  static constexpr float kLog[] = {0.66666666553020461f, 0.40000122753741666f, 0.28550737109047998f,
                                   0.23332382983326009f};
};
template <>
struct MathOf<double> {
  static constexpr double kRound = 0x1.8p52;
  static constexpr int kShift = 52;
  static constexpr int64_t kOne = 0x3ff0000000000000;
  static constexpr int64_t kMantissa = 0x000fffffffffffff;
  static constexpr int64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
  static constexpr double kBias = 1023.0;
  static constexpr double kLn2High = 0x1.62e42fefa3p-1;
  static constexpr double kLn2Low = 2.823529056303157712258845e-13;
  static constexpr double kExpMin = -746.0, kExpMax = 710.0;
  static constexpr double kMinNormal = 0x1p-1022, kToNormal = 0x1p53, kToNormalExponent = 53.0;
  static constexpr double kExp[] = {0.5, 0.16666666666666683419, 0.041666666666666094311,
                                    0.0083333333333170347647, 0.001388888888911562235, 0.0001984126989638274577,
                                    0.000024801586926635283889, 2.7557234862842497439e-6, 2.7557581850757574494e-7,
                                    2.5112036557465568636e-8, 2.0826625505413669821e-9};
  static constexpr double kLog[] = {0.66666666666666697291, 0.39999999999898444386, 0.28571428626399386899,
                                    0.22222211072822302215, 0.18182893219785844422, 0.15331596932448704673,
                                    0.14617872952506914781};
};

template <class A, int N>
inline Vec<A> polynomial(Vec<A> x, const A (&coefficients)[N]) {
  Vec<A> p = splat<A>(coefficients[N - 1]);
  for (int k = N - 2; k >= 0; --k) p = p * x + coefficients[k];
  return p;
}

// 2^k, where `rounded` is kRound + k.
template <class A>
inline Vec<A> power_of_two(Vec<A> rounded) {
  using M = MathOf<A>;
  return (Vec<A>)(((LaneMask<A>)rounded << M::kShift) + M::kOne);
}

template <class A>
inline Vec<A> vexp(Vec<A> x) {
  using M = MathOf<A>;
  // A NaN fails both comparisons and stays.
  x = x > M::kExpMax ? splat<A>(M::kExpMax) : x;
  x = x < M::kExpMin ? splat<A>(M::kExpMin) : x;
  const Vec<A> n = (x * A(1.44269504088896340736) + M::kRound) - M::kRound;
  const Vec<A> r = (x - n * M::kLn2High) - n * M::kLn2Low;
  const Vec<A> p = (r + r * r * polynomial<A>(r, M::kExp)) + A(1);
  // Two factors, since 2^n alone leaves the range of A where the result is subnormal or next to infinity.
  const Vec<A> half = n * A(0.5) + M::kRound;
  return p * power_of_two<A>(half) * power_of_two<A>((n - (half - M::kRound)) + M::kRound);
}

// exp of what is not above 0, which goes to 0 where it would be subnormal: what softmax and logsumexp need, and half
// the exponent arithmetic of vexp. NaN stays. Always inlined: as a call it costs softmax a fifth.
template <class A>
inline __attribute__((always_inline)) Vec<A> vexp_nonpositive(Vec<A> x) {
  using M = MathOf<A>;
  // Just above the log of the least normal number.
  constexpr A kLeast = sizeof(A) == 4 ? A(-87.33) : A(-708.39);
  const LaneMask<A> vanishes = x < kLeast;
  const Vec<A> rounded = x * A(1.44269504088896340736) + M::kRound;
  const Vec<A> n = rounded - M::kRound;
  const Vec<A> r = (x - n * M::kLn2High) - n * M::kLn2Low;
  const Vec<A> p = (r + r * r * polynomial<A>(r, M::kExp)) + A(1);
  return (Vec<A>)((LaneMask<A>)(p * power_of_two<A>(rounded)) & ~vanishes);
}

template <class A>
inline Vec<A> vlog(Vec<A> x) {
  using M = MathOf<A>;
  using Unsigned = Vec<std::make_unsigned_t<BitsOf<A>>>;
  const Vec<A> none = {};
  const LaneMask<A> tiny = x < M::kMinNormal;
  const Vec<A> scaled = tiny ? x * M::kToNormal : x;
  // scaled = m * 2^e with m in [sqrt(1/2), sqrt(2)); the exponent becomes a number by standing in the low bits of one.
  const LaneMask<A> shifted = (LaneMask<A>)scaled + (M::kOne - M::kSqrtHalf);
  const LaneMask<A> exponent = (LaneMask<A>)((Unsigned)shifted >> M::kShift) | (LaneMask<A>)splat<A>(M::kRound);
  const Vec<A> e = ((Vec<A>)exponent - (M::kRound + M::kBias)) - (tiny ? splat<A>(M::kToNormalExponent) : none);
  const Vec<A> f = (Vec<A>)((shifted & M::kMantissa) + M::kSqrtHalf) - A(1);
  const Vec<A> s = f / (f + A(2));
  const Vec<A> z = s * s;
  const Vec<A> half = f * f * A(0.5);
  const Vec<A> r = z * polynomial<A>(z, M::kLog);
  const Vec<A> out = e * M::kLn2High + (f - (half - (s * (half + r) + e * M::kLn2Low)));
  constexpr A kInf = std::numeric_limits<A>::infinity();
  const Vec<A> special =
      x == none ? splat<A>(-kInf) : (x < none ? splat<A>(std::numeric_limits<A>::quiet_NaN()) : x);
  return ((x > none) & (x < kInf)) ? out : special;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
