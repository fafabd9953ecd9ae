// qk_norm_rope: per-head RMSNorm and rotary embedding, in one pass, x read where the projection wrote it
//
// Moves each operand once: weight 2 B/column; x 2 B/element; cos 2 B/element, the same for every i1; sin
// 2 B/element, the same for every i1; out 2 B/element.
// Maths in float32, rounded at the store, and before it where the model rounds.
// Origin: library kernel qk_norm_rope, variant llama.
// Source: https://arxiv.org/abs/2505.09388

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // rows of a block; 1 when more than a warp shares a row
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: PACKS * THREADS * VEC >= cols
#endif
#ifndef VEC
#define VEC 8  // columns of a pack, a divisor of every row and stride
#endif
#ifndef FULL
#define FULL 0  // 1 where PACKS * THREADS * VEC divides cols
#endif
#ifndef LATE
#define LATE 1  // 1 where what rows share is read after the reductions
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

struct bfloat16_bits { unsigned short bits; };

__device__ __forceinline__ float to_float32(bfloat16_bits x) { return __uint_as_float((unsigned)x.bits << 16); }

template <typename T>
__device__ __forceinline__ T from_float32(float x);

template <>
__device__ __forceinline__ bfloat16_bits from_float32(float x) {
    bfloat16_bits y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// The upper half of a pair whose lower half is 0 is a bfloat16 as float32: one instruction, not a slow conversion and a shift.
__device__ __forceinline__ float round_bf16(float x) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, 0f00000000;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}

template <int BYTES> struct Word { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<1> { typedef unsigned char type; };

// VEC neighbours in a row: one 16-byte access (or two). The launch sees to it that rows hold whole packs and are aligned.
template <typename T>
union Pack {
    typedef typename Word<sizeof(T) * VEC>::type word_t;
    word_t words[sizeof(T) * VEC / sizeof(word_t)];  // what is copied: two halves stay in one register
    T at[VEC];
    __device__ __forceinline__ T& operator[](int lane) { return at[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return at[lane]; }
};

// bfloat16 is the upper half of float32: out of the 32 bits that hold two of them each takes one instruction, the upper one out of
// 16 bits takes two.
__device__ __forceinline__ float to_float32(const Pack<bfloat16_bits>& pack, int lane) {
    if (sizeof(pack) < 4) return to_float32(pack[lane]);
    const unsigned both = reinterpret_cast<const unsigned*>(pack.words)[lane / 2];
    return __uint_as_float(lane % 2 ? both & 0xffff0000u : both << 16);
}

// Zeros, unread, where it is not wanted.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, bool is_wanted = true) {
    typedef typename Pack<T>::word_t word_t;
    Pack<T> pack;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n)
        pack.words[n] = is_wanted ? reinterpret_cast<const word_t*>(from)[n] : word_t{};
    return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    typedef typename Pack<T>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

// To two units in the last place, for all numbers: a rounded division has a slow path that it calls.
__device__ __forceinline__ float quotient_16bit(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
};

// Combines one number per thread over a row's threads; every thread gets the result. Each call has its own number, and with
// it its own shared memory: no reader of an earlier one has to be waited for.
template <typename Combine, int NUMBER, typename T>
__device__ __forceinline__ T row_reduce(T value) {
    const Combine combine;
    constexpr int lanes = THREADS < 32 ? THREADS : 32, warps = THREADS / lanes;
    #pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if (warps > 1) {
        __shared__ T partial[warps];
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
        __syncthreads();
        if (warps >= 8 && (warps & (warps - 1)) == 0) {
            value = partial[threadIdx.x % warps];
            #pragma unroll
            for (int distance = warps / 2; distance > 0; distance /= 2)
                value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
        } else {
            value = partial[0];
            #pragma unroll
            for (int warp = 1; warp < warps; ++warp) value = combine(value, partial[warp]);
        }
    }
    return value;
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_qk_norm_rope_27bc4a(
    const bfloat16_bits* __restrict__ weight_ptr,
    const bfloat16_bits* __restrict__ x_ptr,
    const bfloat16_bits* __restrict__ cos_ptr,
    const bfloat16_bits* __restrict__ sin_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t weight_offset,
    index_t x_stride0,
    index_t x_stride1,
    index_t x_offset,
    index_t cos_stride0,
    index_t cos_offset,
    index_t sin_stride0,
    index_t sin_offset,
    index_t out_stride0,
    index_t out_stride1,
    index_t out_offset) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    if (FULL) __builtin_assume(cols == PACKS * THREADS * VEC);  // a mean then takes no division
    const index_t i1 = row % size1;
    const index_t i0 = row / size1;
    const bfloat16_bits* const x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1;
    bfloat16_bits* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
    const float eps = 1e-06f;
    const float product = 2.0f * (float)cols;
    Pack<bfloat16_bits> x_packs[PACKS];
    Pack<bfloat16_bits> x_shifted_packs[PACKS];
    Pack<bfloat16_bits> cos_packs[PACKS];
    Pack<bfloat16_bits> cos_shifted_packs[PACKS];
    Pack<bfloat16_bits> sin_packs[PACKS];
    Pack<bfloat16_bits> sin_shifted_packs[PACKS];
    Pack<bfloat16_bits> weight_packs[PACKS];
    Pack<bfloat16_bits> weight_shifted_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        x_packs[p] = load_pack(x_row + first, is_inside);
        x_shifted_packs[p] = load_pack(x_row + first + x_offset, is_inside);
        cos_packs[p] = load_pack(cos_ptr + i0 * cos_stride0 + first, is_inside);
        cos_shifted_packs[p] = load_pack(cos_ptr + i0 * cos_stride0 + first + cos_offset, is_inside);
        sin_packs[p] = load_pack(sin_ptr + i0 * sin_stride0 + first, is_inside);
        sin_shifted_packs[p] = load_pack(sin_ptr + i0 * sin_stride0 + first + sin_offset, is_inside);
        if (!LATE) weight_packs[p] = load_pack(weight_ptr + first, is_inside);
        if (!LATE) weight_shifted_packs[p] = load_pack(weight_ptr + first + weight_offset, is_inside);
    }

    float total_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            const float x_shifted = to_float32(x_shifted_packs[p], lane);
            total_sum_part += x * x + x_shifted * x_shifted;
        }
    }
    const float total_sum = row_reduce<Sum, 0>(total_sum_part);
    const float rsqrt_total = rsqrtf(eps + quotient_16bit(total_sum, product));

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> out_pack;
        Pack<bfloat16_bits> out_pack_2;
        if (LATE) weight_packs[p] = load_pack(weight_ptr + first);
        if (LATE) weight_shifted_packs[p] = load_pack(weight_ptr + first + weight_offset);
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float weight = to_float32(weight_packs[p], lane);
            const float weight_shifted = to_float32(weight_shifted_packs[p], lane);
            const float x = to_float32(x_packs[p], lane);
            const float x_shifted = to_float32(x_shifted_packs[p], lane);
            const float product_2 = weight * round_bf16(x * rsqrt_total);
            const float product_3 = weight_shifted * round_bf16(x_shifted * rsqrt_total);
            const float cos_2 = to_float32(cos_packs[p], lane);
            const float cos_shifted = to_float32(cos_shifted_packs[p], lane);
            const float sin_2 = to_float32(sin_packs[p], lane);
            const float sin_shifted = to_float32(sin_shifted_packs[p], lane);
            const float out = product_2 * cos_2 + -product_3 * sin_2;
            const float out_shifted = product_3 * cos_shifted + product_2 * sin_shifted;
            out_pack[lane] = from_float32<bfloat16_bits>(out);
            out_pack_2[lane] = from_float32<bfloat16_bits>(out_shifted);
        }
        store_pack(out_row + first, out_pack);
        store_pack(out_row + first + out_offset, out_pack_2);
    }
}
