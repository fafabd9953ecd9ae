// rope_qk_cache: rotary position embedding of queries and keys; keys and values go straight into their rows of a
// static cache
// Moves 37,896 bytes at 28 x 64: every input is read once and every output written once.
// Origin: library kernel rope_qk_cache, variant rotate_half
// Source: https://arxiv.org/abs/2104.09864
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

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
static void part1(const float *__restrict q, const float *__restrict cos, const float *__restrict sin,
        float *__restrict q_out, int64_t rows, int64_t cols, int64_t q_0_row_stride, int64_t q_1_row_stride,
        int64_t q_1_offset, int64_t cos_1_offset, int64_t sin_1_offset, int64_t q_out_0_row_stride,
        int64_t q_out_1_row_stride, int64_t q_out_1_offset, int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < cols; start += kBlock) {
      const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
      const float *q_0_row = q + row * q_0_row_stride;
      const float *q_1_row = q + q_1_offset + row * q_1_row_stride;
      const float *cos_1_row = cos + cos_1_offset;
      const float *sin_1_row = sin + sin_1_offset;
      float *q_out_0_row = q_out + row * q_out_0_row_stride;
      float *q_out_1_row = q_out + q_out_1_offset + row * q_out_1_row_stride;
#pragma omp simd
      for (int64_t col = start; col < stop; ++col) {
        const float q_value = q_0_row[col];
        const float q_value_2 = q_1_row[col];
        q_out_0_row[col] = q_value * cos[col] + -q_value_2 * sin[col];
        q_out_1_row[col] = q_value_2 * cos_1_row[col] + q_value * sin_1_row[col];
      }
    }
  }
}

static void part2(const int64_t *__restrict position, const float *__restrict k, const float *__restrict cos,
        const float *__restrict sin, const float *__restrict v, float *__restrict k_cache,
        float *__restrict v_cache, int64_t rows, int64_t cols, int64_t k_0_row_stride, int64_t k_1_row_stride,
        int64_t k_1_offset, int64_t cos_1_offset, int64_t sin_1_offset, int64_t v_0_row_stride,
        int64_t v_1_row_stride, int64_t v_1_offset, int64_t k_cache_0_row_stride, int64_t k_cache_0_step,
        int64_t k_cache_1_row_stride, int64_t k_cache_1_offset, int64_t k_cache_1_step,
        int64_t v_cache_0_row_stride, int64_t v_cache_0_step, int64_t v_cache_1_row_stride,
        int64_t v_cache_1_offset, int64_t v_cache_1_step, int64_t k_cache_extent, int64_t *__restrict wrong,
        int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < cols; start += kBlock) {
      const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
      const float *k_0_row = k + row * k_0_row_stride;
      const float *k_1_row = k + k_1_offset + row * k_1_row_stride;
      const float *cos_1_row = cos + cos_1_offset;
      const float *sin_1_row = sin + sin_1_offset;
      const float *v_0_row = v + row * v_0_row_stride;
      const float *v_1_row = v + v_1_offset + row * v_1_row_stride;
      const int64_t position_value = position[0];
      const bool in_bounds = fa_inside(position_value, k_cache_extent, 1, wrong);
#pragma omp simd
      for (int64_t col = start; col < stop; ++col) {
        const float k_value = k_0_row[col];
        const float k_value_2 = k_1_row[col];
        if (in_bounds) {
          k_cache[position_value * k_cache_0_step + row * k_cache_0_row_stride + col] =
              k_value * cos[col] + -k_value_2 * sin[col];
          k_cache[k_cache_1_offset + position_value * k_cache_1_step + row * k_cache_1_row_stride + col] =
              k_value_2 * cos_1_row[col] + k_value * sin_1_row[col];
          v_cache[position_value * v_cache_0_step + row * v_cache_0_row_stride + col] = v_0_row[col];
          v_cache[v_cache_1_offset + position_value * v_cache_1_step + row * v_cache_1_row_stride + col] =
              v_1_row[col];
        }
      }
    }
  }
}

extern "C" void fa_rope_qk_cache_a28c3d(const float *__restrict q, const float *__restrict cos,
        const float *__restrict sin, const int64_t *__restrict position, const float *__restrict k,
        const float *__restrict v, float *__restrict q_out, float *__restrict k_cache,
        float *__restrict v_cache, int64_t rows_of_1, int64_t cols_of_1, int64_t q_0_row_stride_of_1,
        int64_t q_1_row_stride_of_1, int64_t q_1_offset_of_1, int64_t cos_1_offset_of_1,
        int64_t sin_1_offset_of_1, int64_t q_out_0_row_stride_of_1, int64_t q_out_1_row_stride_of_1,
        int64_t q_out_1_offset_of_1, int64_t rows_of_2, int64_t cols_of_2, int64_t k_0_row_stride_of_2,
        int64_t k_1_row_stride_of_2, int64_t k_1_offset_of_2, int64_t cos_1_offset_of_2,
        int64_t sin_1_offset_of_2, int64_t v_0_row_stride_of_2, int64_t v_1_row_stride_of_2,
        int64_t v_1_offset_of_2, int64_t k_cache_0_row_stride_of_2, int64_t k_cache_0_step_of_2,
        int64_t k_cache_1_row_stride_of_2, int64_t k_cache_1_offset_of_2, int64_t k_cache_1_step_of_2,
        int64_t v_cache_0_row_stride_of_2, int64_t v_cache_0_step_of_2, int64_t v_cache_1_row_stride_of_2,
        int64_t v_cache_1_offset_of_2, int64_t v_cache_1_step_of_2, int64_t k_cache_extent_of_2,
        int64_t *wrong, int threads) {
  part1(q, cos, sin, q_out, rows_of_1, cols_of_1, q_0_row_stride_of_1, q_1_row_stride_of_1, q_1_offset_of_1,
        cos_1_offset_of_1, sin_1_offset_of_1, q_out_0_row_stride_of_1, q_out_1_row_stride_of_1, q_out_1_offset_of_1,
        threads);
  part2(position, k, cos, sin, v, k_cache, v_cache, rows_of_2, cols_of_2, k_0_row_stride_of_2,
        k_1_row_stride_of_2, k_1_offset_of_2, cos_1_offset_of_2, sin_1_offset_of_2, v_0_row_stride_of_2,
        v_1_row_stride_of_2, v_1_offset_of_2, k_cache_0_row_stride_of_2, k_cache_0_step_of_2,
        k_cache_1_row_stride_of_2, k_cache_1_offset_of_2, k_cache_1_step_of_2, v_cache_0_row_stride_of_2,
        v_cache_0_step_of_2, v_cache_1_row_stride_of_2, v_cache_1_offset_of_2, v_cache_1_step_of_2,
        k_cache_extent_of_2, wrong, threads);
}
