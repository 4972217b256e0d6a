// Feeds PTX texts from standard input to cuModuleLoadData of an emulator that was built with sanitizers. A record is a
// 32-bit length and so many bytes. A text may be taken, or refused as invalid or for another target; anything else is a
// failure. Prints how many were taken and refused.
#include <cstdint>
#include <cstdio>
#include <string>

extern "C" {
int cuInit(unsigned flags);
int cuModuleLoadData(void** module, const void* image);
int cuModuleUnload(void* module);
}

int main() {
  constexpr int kInvalidPtx = 218, kOtherTarget = 209;
  unsigned long taken = 0, refused = 0;
  uint32_t length;
  if (cuInit(0) != 0) return 1;
  while (std::fread(&length, sizeof length, 1, stdin) == 1) {
    std::string text(length, '\0');
    if (std::fread(text.data(), 1, length, stdin) != length) return 2;
    void* module = nullptr;
    const int code = cuModuleLoadData(&module, text.c_str());
    if (code != 0 && code != kInvalidPtx && code != kOtherTarget) {
      std::printf("code %d from:\n%s\n", code, text.c_str());
      return 3;
    }
    if (code == 0 && cuModuleUnload(module) != 0) return 4;
    (code == 0 ? taken : refused)++;
  }
  std::printf("%lu %lu\n", taken, refused);
  return 0;
}
