// rope: rotary position embedding: x * cos + rotate_half(x) * sin, x read where it lies in the projection
//
// Moves each operand once: x 2 B/element, cos 2 B/element, sin 2 B/element, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel rope, variant rotate_half.
// Source: https://arxiv.org/abs/2104.09864

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // rows of a block
#endif
#ifndef VEC
#define VEC 8  // columns of a pack
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

// VEC neighbours in a row; one 16-byte access (or two) where they are.
template <typename T>
struct alignas(sizeof(T) * VEC < 16 ? sizeof(T) * VEC : 16) Pack {
    T at[VEC];
    __device__ __forceinline__ T& operator[](int lane) { return at[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return at[lane]; }
};

// One bit for each column of a pack that lies before the end.
__device__ __forceinline__ unsigned lanes_before(index_t end, index_t first) {
    const index_t left = end - first;
    return left >= VEC ? (1u << VEC) - 1u : left > 0 ? (1u << left) - 1u : 0u;
}

// Lanes whose bit is 0 are not read and give 0.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, unsigned lanes) {
    if (lanes == (1u << VEC) - 1u && reinterpret_cast<unsigned long long>(from) % alignof(Pack<T>) == 0)
        return *reinterpret_cast<const Pack<T>*>(from);
    Pack<T> pack{};
    #pragma unroll
    for (int lane = 0; lane < VEC; ++lane)
        if (lanes >> lane & 1) pack[lane] = from[lane];
    return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack, unsigned lanes) {
    if (lanes == (1u << VEC) - 1u && reinterpret_cast<unsigned long long>(to) % alignof(Pack<T>) == 0) {
        *reinterpret_cast<Pack<T>*>(to) = pack;
        return;
    }
    #pragma unroll
    for (int lane = 0; lane < VEC; ++lane)
        if (lanes >> lane & 1) to[lane] = pack[lane];
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_rope_3286ca(
    const bfloat16_bits* __restrict__ x_ptr,
    const bfloat16_bits* __restrict__ cos_ptr,
    const bfloat16_bits* __restrict__ sin_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t x_stride0,
    index_t x_stride1,
    index_t cos_stride0,
    index_t x_offset,
    index_t x_offset_2,
    index_t sin_stride0,
    index_t out_stride0,
    index_t out_stride1) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= rows) return;
    const index_t i1 = row % size1;
    const index_t i0 = row / size1;
    const bfloat16_bits* const x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1;
    bfloat16_bits* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols; first += step) {
        const unsigned lanes = lanes_before(cols, first);
        const Pack<bfloat16_bits> x_pack = load_pack(x_row + first, lanes);
        const Pack<bfloat16_bits> cos_pack = load_pack(cos_ptr + i0 * cos_stride0 + first, lanes);
        unsigned x_shifted_pack_lanes = 0;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const index_t col = first + lane;
            const bool is_ge = col >= 64;
            x_shifted_pack_lanes |= (unsigned)is_ge << lane;
        }
        x_shifted_pack_lanes &= lanes;
        const Pack<bfloat16_bits> x_shifted_pack = load_pack(x_row + first + x_offset, x_shifted_pack_lanes);
        unsigned x_shifted_pack_2_lanes = 0;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const index_t col = first + lane;
            const bool is_lt = col < 64;
            x_shifted_pack_2_lanes |= (unsigned)is_lt << lane;
        }
        x_shifted_pack_2_lanes &= lanes;
        const Pack<bfloat16_bits> x_shifted_pack_2 = load_pack(x_row + first + x_offset_2, x_shifted_pack_2_lanes);
        const Pack<bfloat16_bits> sin_pack = load_pack(sin_ptr + i0 * sin_stride0 + first, lanes);
        Pack<bfloat16_bits> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const index_t col = first + lane;
            const float x = wide(x_pack[lane]);
            const float cos_2 = wide(cos_pack[lane]);
            const float x_shifted = wide(x_shifted_pack[lane]);
            const bool is_lt = col < 64;
            const float x_shifted_2 = wide(x_shifted_pack_2[lane]);
            const float sin_2 = wide(sin_pack[lane]);
            const float out = x * cos_2 + (is_lt ? -x_shifted_2 : x_shifted) * sin_2;
            out_pack[lane] = narrow<bfloat16_bits>(out);
        }
        store_pack(out_row + first, out_pack, lanes);
    }
}
