// gelu_tanh: mul -> pow -> mul -> add -> mul -> tanh -> add -> mul in one kernel
// Moves 65,536 bytes at 8192: every input is read once and every output written once.
// Origin: library kernel gelu_tanh, variant written_out
// Source: https://arxiv.org/abs/1606.08415
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>

// ---- helpers ----

static inline uint32_t fa_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float fa_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The build contracts nothing by itself; polynomials ask for it, where the CPU has it.
static inline float fa_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// e^r - 1 = r + r^2 p(r) for |r| <= ln(2)/2; the fit's relative error is 1.4e-8.
static inline float fa_expm1_core(float r) {
  float p = 1.38825108e-3f;
  p = fa_fma(p, r, 8.36654752e-3f);
  p = fa_fma(p, r, 4.16672006e-2f);
  p = fa_fma(p, r, 1.66665435e-1f);
  p = fa_fma(p, r, 4.9999997e-1f);
  return fa_fma(p * r, r, r);
}

// 2^n for an integral n in [-126, 127]: a sum of 1.5 * 2^23 and n ends in n's own bits. A cast of NaN to an integer is undefined.
static inline float fa_pow2(float n) { return fa_from_bits((fa_bits(n + 0x1.8p23f) + 127u) << 23); }

// y 2^n in two steps, so that a subnormal result is rounded once and 2^128 is reached without overflow on the way.
static inline float fa_scale(float y, float n) {
  const float half = std::trunc(n * 0.5f);
  return y * fa_pow2(half) * fa_pow2(n - half);
}

// e^x to 1 ulp: x = n ln(2) + r with ln(2) in two parts. Beyond the clamps the result is 0 or Inf; a NaN fails both compares.
// Where it is 0 nothing subnormal is computed on the way: that made a softmax of half masked rows six times slower.
static inline float fa_exp(float x) {
  const bool is_zero = x < -104.0f;
  x = x > 89.0f ? 89.0f : x;
  x = is_zero ? 0.0f : x;
  const float n = std::rint(x * 1.44269504f);
  const float r = fa_fma(n, 2.12194440e-4f, fa_fma(n, -0.693359375f, x));
  const float result = fa_scale(1.0f + fa_expm1_core(r), n);
  return is_zero ? 0.0f : result;
}

static inline float fa_sigmoid(float x) { return 1.0f / (1.0f + fa_exp(-x)); }

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_gelu_tanh_c3eea0(const float *__restrict x, float *__restrict out, int64_t n, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (n >= kParallelFrom)
  for (int64_t i = 0; i < n; ++i) {
    const float x_value = x[i];
    const float sum = x_value + x_value * (x_value * x_value) * 0.044715f;
    out[i] = x_value * fa_sigmoid(sum * 1.5957691216057308f);
  }
}

// ---- launch ----

#include <omp.h>
#include <stdexcept>

// Defaults are the sizes and strides of the kernel's site, in elements.
static inline void launch(
    const float *x,
    float *out,
    int64_t n = 8192,
    int threads = omp_get_max_threads()) {
  fa_gelu_tanh_c3eea0(
      x,
      out,
      n,
      threads);
}

// ---- reference and check ----
/*
c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math \
    -DFUSION_ADVISOR_MAIN fa_gelu_tanh_c3eea0.cpp -o check && ./check
*/
#ifdef FUSION_ADVISOR_MAIN

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace check {

static std::mt19937_64 random_bits(0);

template <typename S, typename Convert>
static std::vector<S> normal(size_t count, Convert convert) {
  std::vector<S> found(count);
  for (S &element : found) {
    const uint64_t bits = random_bits();  // four uniform numbers; their sum is close to normal, with variance 1
    const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    element = convert((static_cast<double>(sum) / 65536 - 2) * 1.7320508);
  }
  return found;
}

template <typename S>
static std::vector<S> below(size_t count, long long limit) {
  std::vector<S> found(count);
  for (S &element : found) element = static_cast<S>(random_bits() % limit);
  return found;
}

template <typename T>
static T sigmoid_of(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// The same op by op, computed in T. Outputs of floating point are not rounded to their own type.
template <typename T>
static void reference(
    const float *x,
    T *out) {
  for (long long i0 = 0; i0 < 8192; ++i0) {
    const T x_value = T(x[i0]);
    const T product = (x_value + ((x_value * (x_value * x_value)) * T(0.044715))) * T(1.5957691216057308);
    out[i0] = T(x_value * sigmoid_of<T>(product));
  }
}

// The norm of the difference over the norm of the truth.
template <typename S, typename T, typename Read>
static double relative_error(const std::vector<S> &found, const std::vector<T> &right, Read read) {
  double difference = 0, scale = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    const double a = read(found[i]), b = static_cast<double>(right[i]);
    if (a == b || (a != a && b != b)) {
      scale += std::isfinite(b) ? b * b : 0;
      continue;
    }
    difference += std::isfinite(a - b) ? (a - b) * (a - b) : INFINITY;
    scale += std::isfinite(b) ? b * b : 0;
  }
  return difference == 0 ? 0 : std::sqrt(difference / scale);
}

// An op-by-op computation in float, rounded once, has the error `plain`; the kernel may have half as much again.
static bool is_within(const char *name, double error, double plain) {
  const double limit = 1.5 * plain + 5e-07;
  std::printf("%s: relative error %.2e, limit %.2e: %s\n", name, error, limit, error <= limit ? "ok" : "WRONG");
  return error <= limit;
}

}  // namespace check

int main() {
  using namespace check;
  std::vector<float> x_host = normal<float>(8192, [](double number) { return static_cast<float>(number); });
  std::vector<float> out_host(8192);
  std::vector<double> out_truth(8192);
  std::vector<float> out_plain(8192);
  reference<double>(x_host.data(), out_truth.data());
  reference<float>(x_host.data(), out_plain.data());
  launch(x_host.data(), out_host.data());
  std::vector<double> microseconds;
  for (int run = 0; run < 30; ++run) {
    const auto start = std::chrono::steady_clock::now();
    launch(x_host.data(), out_host.data());
    microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  bool is_right = true;
  const auto read_out = [](float element) { return static_cast<double>(element); };
  const auto store_out = [](float number) { return static_cast<double>(static_cast<float>(number)); };
  is_right &= is_within("out", relative_error(out_host, out_truth, read_out),
                        relative_error(out_plain, out_truth, store_out));
  std::sort(microseconds.begin(), microseconds.end());
  const double median = microseconds[microseconds.size() / 2];
  std::printf("fa_gelu_tanh_c3eea0: %.2f us, %.1f GB/s\n", median, 65536.0 / median / 1e3);
  return is_right ? 0 : 1;
}

#endif
