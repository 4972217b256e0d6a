// Runs the runtime against the stub driver whose path is the first argument; exits with 1 and a line for each failed
// check.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/launcher.h"
#include "runtime/registry.h"

using namespace jax_fa4;

namespace {

int failures = 0;

void Check(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what);
}

std::string MessageOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const RuntimeFailure& failure) {
    return failure.what();
  }
  return "";
}

KernelBinary FillBinary(const std::string& hash) {
  KernelBinary binary;
  binary.hash = hash;
  binary.name = "fill-kernel";
  binary.entry = "fill";
  binary.cubin = "STUB entry=fill params=8,4,4";
  binary.architecture = {"sm_90a", {9, 0}, false};
  binary.alternatives = "sm_90a";
  binary.recipe.parameters = {
      {ParameterKind::kResult, 0, 0, 8}, {ParameterKind::kInt32, 0, 8, 4}, {ParameterKind::kFloat32, 0, 12, 4}};
  binary.recipe.result_count = 1;
  binary.recipe.integer_count = 2;
  binary.recipe.float_count = 1;
  binary.recipe.grid = {1, 1, 1};
  return binary;
}

// Loads if need be, fills `count` floats with `value` through the stub, and looks at them.
bool FillOnce(Driver& driver, const std::string& hash, int ordinal, float value) {
  std::vector<float> to(100, -1.0f);
  const driver_api::DevicePointer result = reinterpret_cast<driver_api::DevicePointer>(to.data());
  const std::int64_t integers[] = {static_cast<std::int64_t>(to.size()), 1};
  const LoadedKernel& kernel = Load(driver, hash, ordinal);
  Launch(kernel, {nullptr, 0, &result, 1, integers, 2, &value, 1}, nullptr);
  for (float one : to) {
    if (one != value) return false;
  }
  return true;
}

void TestManyThreadsFirstUse(Driver& driver) {
  for (int round = 0; round < 20; ++round) {
    const std::string hash = "threads-" + std::to_string(round);
    std::atomic<int> waiting{8};
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        --waiting;
        while (waiting.load() > 0) std::this_thread::yield();
        RegisterBinary(FillBinary(hash));
        for (int call = 0; call < 10; ++call) right += FillOnce(driver, hash, i % 2, static_cast<float>(call));
      });
    }
    for (std::thread& thread : threads) thread.join();
    Check(right == 80, "8 threads, 10 calls each, 2 devices: every call fills its own buffer");
  }
}

void TestFork(Driver& driver) {
  RegisterBinary(FillBinary("fork"));
  FillOnce(driver, "fork", 0, 1.0f);
  const pid_t child = fork();
  if (child == 0) {
    const bool forgot = !MessageOf([&] { FindLoaded(driver, "fork", 0); }).empty();
    const bool filled = FillOnce(driver, "fork", 0, 2.0f);
    _exit(forgot && filled ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  Check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child loads again and launches");
  Check(&FindLoaded(driver, "fork", 0) != nullptr, "the parent keeps what it loaded");
}

void TestRefusals(Driver& driver) {
  KernelBinary binary = FillBinary("wrong-parameter");
  binary.recipe.parameters[1].bytes = 8;
  Check(MessageOf([&] { RegisterBinary(binary); }).find("parameter 1") != std::string::npos, "a wrong size is refused");
  binary = FillBinary("missing-value");
  binary.recipe.parameters[0].index = 1;
  Check(!MessageOf([&] { RegisterBinary(binary); }).empty(), "a result that no call has is refused");
  Check(MessageOf([&] { Load(driver, "nobody", 0); }).find("nobody") != std::string::npos, "an unknown hash is named");

  RegisterBinary(FillBinary("values"));
  const LoadedKernel& kernel = Load(driver, "values", 0);
  const driver_api::DevicePointer result = 0;
  const float value = 0;
  const std::int64_t large[] = {std::int64_t{1} << 31, 1};
  const std::int64_t empty[] = {0, 0};
  Check(!MessageOf([&] { Launch(kernel, {nullptr, 0, &result, 1, large, 2, &value, 1}, nullptr); }).empty(),
        "an integer that does not fit is refused");
  Check(!MessageOf([&] { Launch(kernel, {nullptr, 0, &result, 1, empty, 1, &value, 1}, nullptr); }).empty(),
        "a missing integer is refused");
  Check(MessageOf([&] { Launch(kernel, {nullptr, 0, &result, 1, empty, 2, &value, 1}, nullptr); }).empty(),
        "an empty grid launches nothing");
}

void TestDivisors() {
  for (std::uint32_t d : {1u, 2u, 3u, 7u, 8u, 641u, 65535u, 65537u, 0x7fffffffu, 0x80000001u, 0xffffffffu}) {
    const Divisor made = MakeDivisor(d);
    for (std::uint32_t n : {0u, 1u, d - 1, d, d + 1, 12345678u, 0x7fffffffu, 0xfffffffeu, 0xffffffffu}) {
      const std::uint32_t high = static_cast<std::uint32_t>(std::uint64_t{n} * made.multiplier >> 32);
      const std::uint32_t quotient = (high + ((n - high) >> made.shift1)) >> made.shift2;
      Check(quotient == n / d, "division by multiplication");
    }
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 2) return 2;
  DeclareDriver("stub", arguments[1], ImageKind::kCubin);
  Driver& driver = FindDriver("stub");
  TestManyThreadsFirstUse(driver);
  TestFork(driver);
  TestRefusals(driver);
  TestDivisors();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
