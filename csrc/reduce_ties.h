// The gradient of an extremum, of values or of magnitudes: an equal part to all that reach it. Included once a SIMD
// level, inside its namespace, by the kernel headers that need it.

// How many equal the extremum.
template <class T>
struct Ties : ReduceOp<Ties<T>> {
  using In = T;
  using A = Acc<T>;
  using Out = double;
  struct Lanes {
    Vec<A> least, ties;
  };
  struct State {
    A least = Order<A>::last();
    double ties = 0;
  };
  Order<A> order;

  Lanes init() const { return {splat<A>(Order<A>::last()), Vec<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const Vec<A> one = splat<A>(1);
    Vec<A> least = lanes.least;
    for (int r = 0; r < R; ++r) {
      x[r] = kept[r] ? order.key(x[r]) : splat<A>(Order<A>::last());
      least = better<false, A>(x[r], least);
    }
    // A new least starts the count again.
    lanes.ties = keep<A>(lanes.ties, least == lanes.least);
    lanes.least = least;
    Vec<A> equal[R];
    for (int r = 0; r < R; ++r) equal[r] = keep<A>(one, (x[r] == least) & kept[r]);
    lanes.ties += tree<R>(equal, [](Vec<A> a, Vec<A> b) { return a + b; });
  }
  void collect(State& s, const Lanes& lanes) const {
    for (int i = 0; i < kLanes<A>; ++i) combine(s, lane(lanes, i, 0));
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {lanes.least[i], lanes.ties[i]}; }
  void combine(State& s, const State& other) const {
    if (other.least < s.least) s = other;
    else if (other.least == s.least) s.ties += other.ties;
  }
  Out finalize(const State& s) const { return s.ties; }
};

// `share` to what equals the extremum, with the sign of x where it is one of magnitudes. A NaN equals nothing: then the
// share is NaN, and goes to all.
template <class T>
struct Share {
  using In = T;
  using A = Acc<T>;
  bool magnitudes;
  Vec<A> operator()(Vec<A> x, Vec<A> share, Vec<A> extremum) const {
    const LaneMask<A> all = extremum != extremum;
    if (!magnitudes) return keep<A>(share, (x == extremum) | all);
    const LaneMask<A> sign = (LaneMask<A>)x & std::numeric_limits<BitsOf<A>>::min();
    const Vec<A> signed_share = (Vec<A>)((LaneMask<A>)share ^ sign);
    return keep<A>(signed_share, ((magnitude<A>(x) == extremum) & (x != A(0))) | all);
  }
};

template <class T>
void share_gradient(const GradientCall& call, const void* of, bool greatest, bool magnitudes) {
  const int64_t outputs = call.nest.slices;
  const auto* grad = static_cast<const T*>(call.grad.const_data_ptr());
  std::vector<double> ties(outputs);
  reduce(Ties<T>{{}, Order<Acc<T>>::make(greatest, magnitudes, false)}, call.nest, call.x.const_data_ptr(),
         call.mask.const_data_ptr(), ties.data());
  Params<T> params(outputs);
  for (int64_t i = 0; i < outputs; ++i) {
    params.b[i] = static_cast<Acc<T>>(static_cast<const T*>(of)[i]);
    const bool nan = params.b[i] != params.b[i];
    const auto g = static_cast<double>(grad[i]);
    params.a[i] = static_cast<Acc<T>>(nan ? std::numeric_limits<double>::quiet_NaN() : g / ties[i]);
  }
  write_gradient(Share<T>{magnitudes}, call, params);
}
