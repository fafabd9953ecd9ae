// add_rmsnorm: residual add and RMSNorm in one pass; returns the sum and the normed rows
//
// Moves each operand once: x 2 B/element, residual 2 B/element, weight 2 B/column, total 2 B/element, out
// 2 B/element.
// Maths in float32, rounded at the store, and before it where the model rounds.
// Origin: library kernel add_rmsnorm, variant llama.
// Source: https://arxiv.org/abs/1910.07467

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

// Rounded as IEEE division rounds, by Markstein (1990): the product with the reciprocal, which is a constant where the launch knows
// the count, and a correction by what it leaves over. The division itself is 14 instructions and a call.
__device__ __forceinline__ float mean_of(float total, float count) {
    const float inverse = 1.0f / count, mean = __fmul_rn(total, inverse);  // no fused difference may take it unrounded
    const float rounded = fmaf(fmaf(-mean, count, total), inverse, mean);
    return mean - mean == 0.0f ? rounded : mean;  // infinity leaves NaN over
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
fa_add_rmsnorm_fed0d5(
    const bfloat16_bits* __restrict__ x_ptr,
    const bfloat16_bits* __restrict__ residual_ptr,
    const bfloat16_bits* __restrict__ weight_ptr,
    bfloat16_bits* __restrict__ total_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t x_stride0,
    index_t residual_stride0,
    index_t total_stride0,
    index_t out_stride0) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    if (FULL) __builtin_assume(cols == PACKS * THREADS * VEC);  // a mean then takes no division
    const float eps = 1e-06f;
    Pack<bfloat16_bits> x_packs[PACKS];
    Pack<bfloat16_bits> residual_packs[PACKS];
    Pack<bfloat16_bits> weight_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        x_packs[p] = load_pack(x_ptr + row * x_stride0 + first, is_inside);
        residual_packs[p] = load_pack(residual_ptr + row * residual_stride0 + first, is_inside);
        weight_packs[p] = load_pack(weight_ptr + first, is_inside);
    }

    float total_squared_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> total_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            const float residual = to_float32(residual_packs[p], lane);
            const float total = x + residual;
            total_squared_sum_part += total * total;
            total_pack[lane] = from_float32<bfloat16_bits>(total);
        }
        store_pack(total_ptr + row * total_stride0 + first, total_pack);
    }
    const float total_squared_sum = row_reduce<Sum, 0>(total_squared_sum_part);
    const float total_squared_mean_eps = mean_of(total_squared_sum, (float)cols) + eps;
    const float inverse_rms = rsqrtf(total_squared_mean_eps);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            const float residual = to_float32(residual_packs[p], lane);
            const float total = x + residual;
            const float weight = to_float32(weight_packs[p], lane);
            const float out = weight * round_bf16(total * inverse_rms);
            out_pack[lane] = from_float32<bfloat16_bits>(out);
        }
        store_pack(out_ptr + row * out_stride0 + first, out_pack);
    }
}
