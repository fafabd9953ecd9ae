// embedding_add: token rows and position rows looked up and added, each row read once
// Moves 277,102,592 bytes at 16 x 2048 x 1024: every input is read once and every output written once.
// Origin: library kernel embedding_add, variant looked_up
// Source: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
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
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_embedding_add_672d0e(const int64_t *__restrict ids, const float *__restrict weight,
        const int64_t *__restrict position_ids, const float *__restrict positions, float *__restrict out,
        int64_t n0, int64_t n1, int64_t cols, int64_t ids_i0_stride, int64_t weight_step,
        int64_t positions_step, int64_t out_i0_stride, int64_t out_i1_stride, int64_t weight_extent,
        int64_t positions_extent, int64_t *__restrict wrong, int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t start = 0; start < cols; start += kBlock) {
        const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
        float *out_row = out + i0 * out_i0_stride + i1 * out_i1_stride;
        const int64_t ids_value = ids[i0 * ids_i0_stride + i1];
        const bool in_bounds = fa_inside(ids_value, weight_extent, 1, wrong);
        const int64_t position_ids_value = position_ids[i1];
        const bool in_bounds_2 = fa_inside(position_ids_value, positions_extent, 2, wrong);
#pragma omp simd
        for (int64_t col = start; col < stop; ++col) {
          const float weight_value = in_bounds ? weight[ids_value * weight_step + col] : 0.0f;
          const float positions_value = in_bounds_2 ? positions[position_ids_value * positions_step + col] : 0.0f;
          out_row[col] = weight_value + positions_value;
        }
      }
    }
  }
}
