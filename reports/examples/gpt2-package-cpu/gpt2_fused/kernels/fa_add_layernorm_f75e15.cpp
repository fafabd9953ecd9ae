// add_layernorm: add -> layer_norm in one kernel
// Moves 25,088 bytes at 32 x 64: every input is read once and every output written once.
// Origin: library kernel add_layernorm, variant pre_norm
// Source: https://arxiv.org/abs/1607.06450
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_add_layernorm_f75e15(const float *__restrict x, const float *__restrict residual,
        const float *__restrict weight, const float *__restrict bias, float *__restrict out, int64_t rows,
        int64_t cols, int64_t x_row_stride, int64_t residual_row_stride, int64_t out_row_stride, int threads) {
  const float eps = 1e-05f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    const float *x_row = x + row * x_row_stride;
    const float *residual_row = residual + row * residual_row_stride;
    float *out_row = out + row * out_row_stride;
    double row_sum = 0;
    for (int64_t start = 0; start < cols; start += kChunk) {
      const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
      float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
      for (int64_t col = start; col < stop; ++col) {
        row_sum_part += x_row[col] + residual_row[col];
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
        const float centred = x_row[col] + residual_row[col] - mean;
        square_sum_part += centred * centred;
      }
      square_sum += square_sum_part;
    }
    const float variance = static_cast<float>(square_sum) / static_cast<float>(cols);
    const float inverse_root = 1.0f / std::sqrt(variance + eps);
#pragma omp simd
    for (int64_t col = 0; col < cols; ++col) {
      const float product = (x_row[col] + residual_row[col] - mean) * inverse_root;
      out_row[col] = product * weight[col] + bias[col];
    }
  }
}

// ---- launch ----

#include <omp.h>
#include <stdexcept>

// Defaults are the sizes and strides of the kernel's site, in elements.
static inline void launch(
    const float *x,
    const float *residual,
    const float *weight,
    const float *bias,
    float *out,
    int64_t rows = 32,
    int64_t cols = 64,
    int64_t x_row_stride = 64,
    int64_t residual_row_stride = 64,
    int64_t out_row_stride = 64,
    int threads = omp_get_max_threads()) {
  fa_add_layernorm_f75e15(
      x,
      residual,
      weight,
      bias,
      out,
      rows,
      cols,
      x_row_stride,
      residual_row_stride,
      out_row_stride,
      threads);
}

// ---- reference and check ----
/*
c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math \
    -DFUSION_ADVISOR_MAIN fa_add_layernorm_f75e15.cpp -o check && ./check
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
    const float *x,
    const float *residual,
    const float *weight,
    const float *bias,
    T *out) {
  for (long long i0 = 0; i0 < 32; ++i0) {
    T row_sum = 0;
    for (long long i1 = 0; i1 < 64; ++i1) {
      const T x_value = T(x[i0 * 64LL + i1]);
      const T residual_value = T(residual[i0 * 64LL + i1]);
      const T total = x_value + residual_value;
      row_sum += total;
    }
    T row_sum_2 = 0;
    for (long long i1 = 0; i1 < 64; ++i1) {
      const T x_value = T(x[i0 * 64LL + i1]);
      const T residual_value = T(residual[i0 * 64LL + i1]);
      const T total = x_value + residual_value;
      const T difference = total - (row_sum / T(64.0));
      row_sum_2 += difference * difference;
    }
    for (long long i1 = 0; i1 < 64; ++i1) {
      const T x_value = T(x[i0 * 64LL + i1]);
      const T residual_value = T(residual[i0 * 64LL + i1]);
      const T total = x_value + residual_value;
      const T difference = total - (row_sum / T(64.0));
      const T weight_value = T(weight[i1]);
      const T product = (difference * (T(1) / std::sqrt((row_sum_2 / T(64.0)) + T(1e-05)))) * weight_value;
      const T bias_value = T(bias[i1]);
      out[i0 * 64LL + i1] = T(product + bias_value);
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
  std::vector<float> x_host = normal<float>(2048, [](double number) { return static_cast<float>(number); });
  std::vector<float> residual_host = normal<float>(2048, [](double number) { return static_cast<float>(number); });
  std::vector<float> weight_host = normal<float>(64, [](double number) { return static_cast<float>(number); });
  std::vector<float> bias_host = normal<float>(64, [](double number) { return static_cast<float>(number); });
  std::vector<float> out_host(2048);
  std::vector<double> out_truth(2048);
  std::vector<float> out_plain(2048);
  reference<double>(x_host.data(), residual_host.data(), weight_host.data(), bias_host.data(), out_truth.data());
  reference<float>(x_host.data(), residual_host.data(), weight_host.data(), bias_host.data(), out_plain.data());
  launch(x_host.data(), residual_host.data(), weight_host.data(), bias_host.data(), out_host.data());
  std::vector<double> microseconds;
  for (int run = 0; run < 30; ++run) {
    const auto start = std::chrono::steady_clock::now();
    launch(x_host.data(), residual_host.data(), weight_host.data(), bias_host.data(), out_host.data());
    microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  bool is_right = true;
  const auto read_out = [](float element) { return static_cast<double>(element); };
  const auto store_out = [](float number) { return static_cast<double>(static_cast<float>(number)); };
  is_right &= is_within("out", relative_error(out_host, out_truth, read_out),
                        relative_error(out_plain, out_truth, store_out));
  std::sort(microseconds.begin(), microseconds.end());
  const double median = microseconds[microseconds.size() / 2];
  std::printf("fa_add_layernorm_f75e15: %.2f us, %.1f GB/s\n", median, 25088.0 / median / 1e3);
  return is_right ? 0 : 1;
}

#endif
