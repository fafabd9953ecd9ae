// transformer: embedding -> embedding -> add -> layer_norm in one kernel
// Moves 29,568 bytes at 2 x 16 x 64: every input is read once and every output written once.
// Origin: generated from the chain
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <memory>

// ---- helpers ----

// Leave the first position out of range, and the number of the check that it failed, for the caller, who raises torch's error.
__attribute__((noinline, cold)) static void fa_leave(int64_t number, int64_t check, int64_t *wrong) {
  int64_t none = 0;
  if (__atomic_compare_exchange_n(wrong, &none, check, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) wrong[1] = number;
}

// Whether a position lies in its tensor; nothing is read or written where it does not.
static inline bool fa_inside(int64_t number, int64_t extent, int64_t check, int64_t *wrong) {
  const bool is_inside = static_cast<uint64_t>(number) < static_cast<uint64_t>(extent);
  if (__builtin_expect(!is_inside, 0)) fa_leave(number, check, wrong);
  return is_inside;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_transformer_cb45c7(const int64_t *__restrict x, const float *__restrict weight,
        const int64_t *__restrict x2, const float *__restrict weight2, const float *__restrict weight3,
        const float *__restrict bias, float *__restrict out1, float *__restrict out2, int64_t n0, int64_t n1,
        int64_t cols, int64_t x_i0_stride, int64_t weight_step, int64_t weight2_step, int64_t out1_i0_stride,
        int64_t out1_i1_stride, int64_t out2_i0_stride, int64_t out2_i1_stride, int64_t weight_extent,
        int64_t weight2_extent, int64_t *__restrict wrong, int threads) {
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  {
    const std::unique_ptr<float[]> centred_buffer(new float[cols]);
#pragma omp for collapse(2) schedule(static)
    for (int64_t i0 = 0; i0 < n0; ++i0) {
      for (int64_t i1 = 0; i1 < n1; ++i1) {
        float *out1_row = out1 + i0 * out1_i0_stride + i1 * out1_i1_stride;
        float *out2_row = out2 + i0 * out2_i0_stride + i1 * out2_i1_stride;
        const int64_t x_value = x[i0 * x_i0_stride + i1];
        const bool in_bounds = fa_inside(x_value, weight_extent, 1, wrong);
        const int64_t x2_value = x2[i1];
        const bool in_bounds_2 = fa_inside(x2_value, weight2_extent, 2, wrong);
        double row_sum = 0;
        for (int64_t start = 0; start < cols; start += kChunk) {
          const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
          float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
          for (int64_t col = start; col < stop; ++col) {
            const float weight_value = in_bounds ? weight[x_value * weight_step + col] : 0.0f;
            const float weight2_value = in_bounds_2 ? weight2[x2_value * weight2_step + col] : 0.0f;
            const float sum = weight_value + weight2_value;
            out1_row[col] = sum;
            row_sum_part += sum;
          }
          row_sum += row_sum_part;
        }
        const float mean = static_cast<float>(row_sum) / static_cast<float>(cols);
        double square_sum = 0;
        for (int64_t start = 0; start < cols; start += kChunk) {
          const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
          float square_sum_part = 0;
#pragma omp simd reduction(+ : square_sum_part)
          for (int64_t col = start; col < stop; ++col) {
            const float weight_value = in_bounds ? weight[x_value * weight_step + col] : 0.0f;
            const float weight2_value = in_bounds_2 ? weight2[x2_value * weight2_step + col] : 0.0f;
            const float centred = weight_value + weight2_value - mean;
            centred_buffer[col] = centred;
            square_sum_part += centred * centred;
          }
          square_sum += square_sum_part;
        }
        const float variance = static_cast<float>(square_sum) / static_cast<float>(cols);
        const float inverse_root = 1.0f / std::sqrt(variance + 1e-05f);
#pragma omp simd
        for (int64_t col = 0; col < cols; ++col) {
          const float product = centred_buffer[col] * inverse_root * weight3[col];
          out2_row[col] = product + bias[col];
        }
      }
    }
  }
}

// ---- launch ----

#include <omp.h>
#include <stdexcept>

// Defaults are the sizes and strides of the kernel's site, in elements.
static inline void launch(
    const int64_t *x,
    const float *weight,
    const int64_t *x2,
    const float *weight2,
    const float *weight3,
    const float *bias,
    float *out1,
    float *out2,
    int64_t n0 = 2,
    int64_t n1 = 16,
    int64_t cols = 64,
    int64_t x_i0_stride = 16,
    int64_t weight_step = 64,
    int64_t weight2_step = 64,
    int64_t out1_i0_stride = 1024,
    int64_t out1_i1_stride = 64,
    int64_t out2_i0_stride = 1024,
    int64_t out2_i1_stride = 64,
    int64_t weight_extent = 97,
    int64_t weight2_extent = 32,
    int threads = omp_get_max_threads()) {
  int64_t wrong[2] = {};
  fa_transformer_cb45c7(
      x,
      weight,
      x2,
      weight2,
      weight3,
      bias,
      out1,
      out2,
      n0,
      n1,
      cols,
      x_i0_stride,
      weight_step,
      weight2_step,
      out1_i0_stride,
      out1_i1_stride,
      out2_i0_stride,
      out2_i1_stride,
      weight_extent,
      weight2_extent,
      wrong,
      threads);
  if (wrong[0]) throw std::out_of_range("position out of range");
}

// ---- reference and check ----
/*
c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math \
    -DFUSION_ADVISOR_MAIN fa_transformer_cb45c7.cpp -o check && ./check
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

// The same op by op, computed in T. Outputs of floating point are not rounded to their own type.
template <typename T>
static void reference(
    const int64_t *x,
    const float *weight,
    const int64_t *x2,
    const float *weight2,
    const float *weight3,
    const float *bias,
    T *out1,
    T *out2) {
  for (long long i0 = 0; i0 < 2; ++i0) {
    for (long long i1 = 0; i1 < 16; ++i1) {
      const int64_t x_value = x[i0 * 16LL + i1];
      const bool in_bounds = x_value >= 0 && x_value < 97LL;
      const int64_t x2_value = x2[i1];
      const bool in_bounds_2 = x2_value >= 0 && x2_value < 32LL;
      T row_sum = 0;
      for (long long i2 = 0; i2 < 64; ++i2) {
        const T weight_value = in_bounds ? T(weight[i2 + x_value * 64LL]) : T(0);
        const T weight2_value = in_bounds_2 ? T(weight2[i2 + x2_value * 64LL]) : T(0);
        const T total = weight_value + weight2_value;
        row_sum += total;
      }
      T row_sum_2 = 0;
      for (long long i2 = 0; i2 < 64; ++i2) {
        const T weight_value = in_bounds ? T(weight[i2 + x_value * 64LL]) : T(0);
        const T weight2_value = in_bounds_2 ? T(weight2[i2 + x2_value * 64LL]) : T(0);
        const T total = weight_value + weight2_value;
        const T difference = total - (row_sum / T(64.0));
        row_sum_2 += difference * difference;
      }
      for (long long i2 = 0; i2 < 64; ++i2) {
        const T weight_value = in_bounds ? T(weight[i2 + x_value * 64LL]) : T(0);
        const T weight2_value = in_bounds_2 ? T(weight2[i2 + x2_value * 64LL]) : T(0);
        const T total = weight_value + weight2_value;
        const T difference = total - (row_sum / T(64.0));
        const T weight3_value = T(weight3[i2]);
        const T product = (difference * (T(1) / std::sqrt((row_sum_2 / T(64.0)) + T(1e-05)))) * weight3_value;
        const T bias_value = T(bias[i2]);
        out1[i0 * 1024LL + i1 * 64LL + i2] = T(total);
        out2[i0 * 1024LL + i1 * 64LL + i2] = T(product + bias_value);
      }
    }
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
  std::vector<int64_t> x_host = below<int64_t>(32, 97);
  std::vector<float> weight_host = normal<float>(6208, [](double number) { return static_cast<float>(number); });
  std::vector<int64_t> x2_host = below<int64_t>(16, 32);
  std::vector<float> weight2_host = normal<float>(2048, [](double number) { return static_cast<float>(number); });
  std::vector<float> weight3_host = normal<float>(64, [](double number) { return static_cast<float>(number); });
  std::vector<float> bias_host = normal<float>(64, [](double number) { return static_cast<float>(number); });
  std::vector<float> out1_host(2048);
  std::vector<float> out2_host(2048);
  std::vector<double> out1_truth(2048);
  std::vector<float> out1_plain(2048);
  std::vector<double> out2_truth(2048);
  std::vector<float> out2_plain(2048);
  reference<double>(x_host.data(), weight_host.data(), x2_host.data(), weight2_host.data(), weight3_host.data(), bias_host.data(), out1_truth.data(), out2_truth.data());
  reference<float>(x_host.data(), weight_host.data(), x2_host.data(), weight2_host.data(), weight3_host.data(), bias_host.data(), out1_plain.data(), out2_plain.data());
  launch(x_host.data(), weight_host.data(), x2_host.data(), weight2_host.data(), weight3_host.data(), bias_host.data(), out1_host.data(), out2_host.data());
  std::vector<double> microseconds;
  for (int run = 0; run < 30; ++run) {
    const auto start = std::chrono::steady_clock::now();
    launch(x_host.data(), weight_host.data(), x2_host.data(), weight2_host.data(), weight3_host.data(), bias_host.data(), out1_host.data(), out2_host.data());
    microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  bool is_right = true;
  const auto read_out1 = [](float element) { return static_cast<double>(element); };
  const auto store_out1 = [](float number) { return static_cast<double>(static_cast<float>(number)); };
  is_right &= is_within("out1", relative_error(out1_host, out1_truth, read_out1),
                        relative_error(out1_plain, out1_truth, store_out1));
  const auto read_out2 = [](float element) { return static_cast<double>(element); };
  const auto store_out2 = [](float number) { return static_cast<double>(static_cast<float>(number)); };
  is_right &= is_within("out2", relative_error(out2_host, out2_truth, read_out2),
                        relative_error(out2_plain, out2_truth, store_out2));
  std::sort(microseconds.begin(), microseconds.end());
  const double median = microseconds[microseconds.size() / 2];
  std::printf("fa_transformer_cb45c7: %.2f us, %.1f GB/s\n", median, 29568.0 / median / 1e3);
  return is_right ? 0 : 1;
}

#endif
