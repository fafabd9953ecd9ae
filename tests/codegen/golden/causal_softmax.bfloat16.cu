// causal_softmax: scale, causal mask and softmax in one pass; no mask is read, and nothing of the scores that it
// hides
//
// Moves each operand once: x 2 B/element, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel causal_softmax, variant triu.
// Source: https://arxiv.org/abs/1706.03762

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

#define INF_VALUEF __int_as_float(0x7f800000)

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

// fmaxf and fminf would drop a NaN.
template <typename T>
__device__ __forceinline__ T nan_max(T a, T b) { return (a != a || a > b) ? a : b; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// One instruction instead of three.
__device__ __forceinline__ float nan_max(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
#endif

// Good to 22 bits; below 2^-126 it is 0, a difference that no 16-bit result shows unless it is made of such numbers alone.
__device__ __forceinline__ float exp2_16bit(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of a difference from a maximum: three instructions fewer than __expf, which scales what would be below 2^-126.
__device__ __forceinline__ float exp_16bit(float x) { return exp2_16bit(x * 1.4426950408889634f); }

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
struct Max {
    template <typename T>
    __device__ T operator()(T a, T b) const { return nan_max(a, b); }
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
fa_causal_softmax_e7e63e(
    const bfloat16_bits* __restrict__ x_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t x_stride0,
    index_t x_stride1,
    index_t out_stride0,
    index_t out_stride1) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    const index_t i1 = row % size1;
    const index_t i0 = row / size1;
    const bfloat16_bits* const x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1;
    bfloat16_bits* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
    const float scale = 0.08838834764831845f;
    Pack<bfloat16_bits> x_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        x_packs[p] = load_pack(x_row + first, is_inside && first <= i1);
    }

    float selected_max_part = -INF_VALUEF;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        if (first > i1) {  // the mask hides all of the pack
            const float selected = -INF_VALUEF;
            selected_max_part = nan_max(selected_max_part, selected);
            continue;
        }
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const bool is_kept_2 = lane <= i1 - first;
            const float x = to_float32(x_packs[p], lane);
            const float selected = is_kept_2 ? __fmul_rn(x, scale) : -INF_VALUEF;
            selected_max_part = nan_max(selected_max_part, selected);
        }
    }
    const float selected_max = row_reduce<Max, 0>(selected_max_part);

    float exp_selected_shifted_sum_part = 0;
    float exp_selected_shifted_columns[PACKS][VEC];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        if (first > i1) {  // the mask hides all of the pack
            const float selected = -INF_VALUEF;
            const float exp_selected_shifted = exp_16bit(selected - selected_max);
            exp_selected_shifted_sum_part += VEC * exp_selected_shifted;
            continue;
        }
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const bool is_kept_2 = lane <= i1 - first;
            const float x = to_float32(x_packs[p], lane);
            const float selected = is_kept_2 ? __fmul_rn(x, scale) : -INF_VALUEF;
            const float exp_selected_shifted = exp_16bit(selected - selected_max);
            exp_selected_shifted_sum_part += exp_selected_shifted;
            exp_selected_shifted_columns[p][lane] = exp_selected_shifted;
        }
    }
    const float exp_selected_shifted_sum = row_reduce<Sum, 1>(exp_selected_shifted_sum_part);
    const float inverse_sum = quotient_16bit(1.0f, exp_selected_shifted_sum);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        if (first > i1) {  // the mask hides all of the pack
            const float selected = -INF_VALUEF;
            const float exp_selected_shifted = exp_16bit(selected - selected_max);
            const float out = exp_selected_shifted * inverse_sum;
            Pack<bfloat16_bits> out_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                out_pack[lane] = from_float32<bfloat16_bits>(out);
            }
            store_pack(out_row + first, out_pack);
            continue;
        }
        Pack<bfloat16_bits> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float exp_selected_shifted = exp_selected_shifted_columns[p][lane];
            const float out = exp_selected_shifted * inverse_sum;
            out_pack[lane] = from_float32<bfloat16_bits>(out);
        }
        store_pack(out_row + first, out_pack);
    }
}
