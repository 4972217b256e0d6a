// A small seeded generator (splitmix64): every choice of the emulator comes from here, so a seed repeats a run.
#pragma once

#include <cstdint>

namespace jax_fa4::emulator {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Uniform in [0, bound); bound > 0.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
  bool one_in(uint64_t n) { return below(n) == 0; }
  // Heavy-tailed: as many values in [2^k, 2^(k+1)) for every k below `octaves`.
  uint64_t heavy_tailed(int octaves) {
    const uint64_t low = uint64_t{1} << below(static_cast<uint64_t>(octaves));
    return low + below(low);
  }

 private:
  uint64_t state_;
};

}  // namespace jax_fa4::emulator
