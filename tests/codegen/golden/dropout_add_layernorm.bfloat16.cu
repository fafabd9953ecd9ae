// dropout_add_layernorm: dropout, residual add and LayerNorm in one pass; returns the sum and the normed rows
//
// Moves each operand once: residual 2 B/element, x 2 B/element, seed 8 B in all, weight 2 B/column, bias
// 2 B/column, total 2 B/element, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below
// 429496730, p = 0.1 of 2**32; the others are scaled by 1 / (1 - p).
// Origin: library kernel dropout_add_layernorm, variant pre_norm.
// Source: https://doi.org/10.1145/2063384.2063405, https://arxiv.org/abs/1607.06450

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

struct Words { unsigned at[4]; };

// Philox4x32-10 (Salmon et al., SC'11) of the counter (low, high, 0, 0). Four neighbouring elements share a counter.
__device__ __forceinline__ Words philox(long long seed, index_t counter) {
    unsigned a = (unsigned)counter, b = sizeof(index_t) > 4 ? (unsigned)((long long)counter >> 32) : 0u, c = 0, d = 0;
    unsigned low_key = (unsigned)seed, high_key = (unsigned)(seed >> 32);
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
        a = (unsigned)(second >> 32) ^ b ^ low_key;
        b = (unsigned)second;
        c = (unsigned)(first >> 32) ^ d ^ high_key;
        d = (unsigned)first;
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
    return Words{ {a, b, c, d} };
}

// The word of an element; no array is indexed by what only the thread knows.
__device__ __forceinline__ unsigned word_of(const Words& words, int element) {
    const unsigned low = element & 1 ? words.at[1] : words.at[0], high = element & 1 ? words.at[3] : words.at[2];
    return element & 2 ? high : low;
}

// Which of VEC neighbours dropout keeps. The first one's number is a multiple of VEC, or of 4: one call serves four.
__device__ __forceinline__ unsigned kept_bits(long long seed, index_t element, unsigned threshold) {
    unsigned bits = 0;
    #pragma unroll
    for (int n = 0; n < VEC; n += 4) {
        const Words words = philox(seed, (element + n) >> 2);
        #pragma unroll
        for (int lane = 0; lane < 4 && n + lane < VEC; ++lane)
            bits |= (unsigned)(word_of(words, VEC < 4 ? (int)element + lane : lane) >= threshold) << (n + lane);
    }
    return bits;
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
fa_dropout_add_layernorm_194ffc(
    const bfloat16_bits* __restrict__ residual_ptr,
    const bfloat16_bits* __restrict__ x_ptr,
    const long long* __restrict__ seed_ptr,
    const bfloat16_bits* __restrict__ weight_ptr,
    const bfloat16_bits* __restrict__ bias_ptr,
    bfloat16_bits* __restrict__ total_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t residual_stride0,
    index_t x_stride0,
    index_t element_stride0,
    index_t total_stride0,
    index_t out_stride0) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    if (FULL) __builtin_assume(cols == PACKS * THREADS * VEC);  // a mean then takes no division
    const long long seed = seed_ptr[0];
    const float eps = 1e-05f;
    Pack<bfloat16_bits> residual_packs[PACKS];
    Pack<bfloat16_bits> x_packs[PACKS];
    Pack<bfloat16_bits> weight_packs[PACKS];
    Pack<bfloat16_bits> bias_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        residual_packs[p] = load_pack(residual_ptr + row * residual_stride0 + first, is_inside);
        x_packs[p] = load_pack(x_ptr + row * x_stride0 + first, is_inside);
        if (!LATE) weight_packs[p] = load_pack(weight_ptr + first, is_inside);
        if (!LATE) bias_packs[p] = load_pack(bias_ptr + first, is_inside);
    }
    unsigned kept[PACKS];  // a bit for each column
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        kept[p] = kept_bits(seed, row * element_stride0 + first, 429496730u);
    }

    float total_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> total_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float residual = to_float32(residual_packs[p], lane);
            const float x = to_float32(x_packs[p], lane);
            const float factor = kept[p] >> lane & 1 ? 1.1111111111111112f : 0.0f;
            const float total = residual + x * factor;
            total_sum_part += total;
            total_pack[lane] = from_float32<bfloat16_bits>(total);
        }
        store_pack(total_ptr + row * total_stride0 + first, total_pack);
    }
    const float total_sum = row_reduce<Sum, 0>(total_sum_part);
    const float total_mean = mean_of(total_sum, (float)cols);

    float total_centered_squared_sum_part = 0;
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float residual = to_float32(residual_packs[p], lane);
            const float x = to_float32(x_packs[p], lane);
            const float factor = kept[p] >> lane & 1 ? 1.1111111111111112f : 0.0f;
            const float total = residual + x * factor;
            const float total_centered = total - total_mean;
            total_centered_squared_sum_part += total_centered * total_centered;
        }
    }
    const float total_centered_squared_sum = row_reduce<Sum, 1>(total_centered_squared_sum_part);
    const float total_variance = mean_of(total_centered_squared_sum, (float)cols);
    const float inverse_deviation = rsqrtf(total_variance + eps);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<bfloat16_bits> out_pack;
        if (LATE) weight_packs[p] = load_pack(weight_ptr + first);
        if (LATE) bias_packs[p] = load_pack(bias_ptr + first);
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float residual = to_float32(residual_packs[p], lane);
            const float x = to_float32(x_packs[p], lane);
            const float factor = kept[p] >> lane & 1 ? 1.1111111111111112f : 0.0f;
            const float total = residual + x * factor;
            const float total_centered = total - total_mean;
            const float weight = to_float32(weight_packs[p], lane);
            const float bias = to_float32(bias_packs[p], lane);
            const float out = total_centered * inverse_deviation * weight + bias;
            out_pack[lane] = from_float32<bfloat16_bits>(out);
        }
        store_pack(out_ptr + row * out_stride0 + first, out_pack);
    }
}
