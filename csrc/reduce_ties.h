// The gradient of an extremum, of values or of magnitudes: an equal part to all that reach it. Included once a SIMD
// level, inside its namespace, by the kernel headers that need it.

// How many equal the extremum.
template <class T>
struct Ties {
  using In = T;
  using A = Acc<T>;
  using Out = double;
  static constexpr int64_t kPeriod = 256;
  struct Lanes {
    Vec<A> least, ties;
  };
  struct State {
    A least = Order<A>::last();
    double ties = 0;
  };
  Order<A> order;

  Lanes nothing() const { return {splat<A>(Order<A>::last()), Vec<A>{}}; }
  template <int R>
  void see(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const Vec<A> one = splat<A>(1);
    Vec<A> least = lanes.least;
    for (int r = 0; r < R; ++r) {
      x[r] = kept[r] ? order.see(x[r]) : splat<A>(Order<A>::last());
      least = better<false, A>(x[r], least);
    }
    // A new least starts the count again.
    lanes.ties = keep<A>(lanes.ties, least == lanes.least);
    lanes.least = least;
    Vec<A> equal[R];
    for (int r = 0; r < R; ++r) equal[r] = keep<A>(one, (x[r] == least) & kept[r]);
    lanes.ties += tree<R>(equal, [](Vec<A> a, Vec<A> b) { return a + b; });
  }
  void row(State& s, const T* x, const uint8_t* m, int64_t n, int64_t) const { see_row(*this, s, x, m, n); }
  void collect(State& s, const Lanes& lanes) const {
    for (int i = 0; i < kLanes<A>; ++i) merge(s, lane(lanes, i, 0));
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {lanes.least[i], lanes.ties[i]}; }
  void merge(State& s, const State& other) const {
    if (other.least < s.least) s = other;
    else if (other.least == s.least) s.ties += other.ties;
  }
  bool done(const State&) const { return false; }
  Out finish(const State& s) const { return s.ties; }
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
void share_gradient(const Layout& layout, const MapLayout& map, const void* grad, const void* of, const void* x,
                    const void* m, void* out, bool greatest, bool magnitudes) {
  std::vector<double> ties(layout.outputs);
  reduce(Ties<T>{Order<Acc<T>>::make(greatest, magnitudes, false)}, layout, x, m, ties.data());
  Params<T> params(layout.outputs);
  for (int64_t i = 0; i < layout.outputs; ++i) {
    params.b[i] = static_cast<Acc<T>>(static_cast<const T*>(of)[i]);
    const bool nan = params.b[i] != params.b[i];
    const auto g = static_cast<double>(static_cast<const T*>(grad)[i]);
    params.a[i] = static_cast<Acc<T>>(nan ? std::numeric_limits<double>::quiet_NaN() : g / ties[i]);
  }
  map_gradient(Share<T>{magnitudes}, map, params, x, m, out);
}
