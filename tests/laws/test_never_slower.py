"""Law 4: never slower than the plain idiom. Speed is shown by benchmarks; here it is held that each function has them."""
