// rope_interleaved: rotary position embedding over neighbouring pairs: x * cos + rotate_pairs(x) * sin, x read
// where it lies in the projection
//
// Moves each operand once: x 2 B/element, cos 2 B/element, sin 2 B/element, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel rope_interleaved, variant stack.
// Source: https://arxiv.org/abs/2104.09864

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // threads along a column
#endif
#ifndef PACKS
#define PACKS 1  // packs of a thread: neighbouring rows, a divisor of their count
#endif
#ifndef VEC
#define VEC 1  // columns of a pack, a divisor of every row and stride
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

struct bfloat16_bits { unsigned short bits; };

__device__ __forceinline__ float wide(bfloat16_bits x) { return __uint_as_float((unsigned)x.bits << 16); }

template <typename T>
__device__ __forceinline__ T narrow(float x);

template <>
__device__ __forceinline__ bfloat16_bits narrow(float x) {
    bfloat16_bits y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_rope_interleaved_915ac2(
    const bfloat16_bits* __restrict__ x_ptr,
    const bfloat16_bits* __restrict__ cos_ptr,
    const bfloat16_bits* __restrict__ sin_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t x_stride0,
    index_t x_stride1,
    index_t x_stride2,
    index_t x_offset,
    index_t cos_stride0,
    index_t cos_stride2,
    index_t cos_offset,
    index_t sin_stride0,
    index_t sin_stride2,
    index_t sin_offset,
    index_t out_stride0,
    index_t out_stride1,
    index_t out_stride2,
    index_t out_offset) {
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i0 = top / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols; first += step) {
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const bfloat16_bits* const x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1;
            bfloat16_bits* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
            if (!is_inside) continue;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const index_t col = first + lane;
                const float x = wide(x_row[col * x_stride2]);
                const float x_shifted = wide(x_row[col * x_stride2 + x_offset]);
                const float cos_2 = wide(cos_ptr[i0 * cos_stride0 + col * cos_stride2]);
                const float cos_shifted = wide(cos_ptr[i0 * cos_stride0 + col * cos_stride2 + cos_offset]);
                const float sin_2 = wide(sin_ptr[i0 * sin_stride0 + col * sin_stride2]);
                const float sin_shifted = wide(sin_ptr[i0 * sin_stride0 + col * sin_stride2 + sin_offset]);
                const float out = x * cos_2 + -x_shifted * sin_2;
                const float out_2 = x_shifted * cos_shifted + x * sin_shifted;
                out_row[col * out_stride2] = narrow<bfloat16_bits>(out);
                out_row[col * out_stride2 + out_offset] = narrow<bfloat16_bits>(out_2);
            }
        }
    }
}
