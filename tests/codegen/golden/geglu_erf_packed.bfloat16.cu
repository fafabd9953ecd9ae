// geglu_erf_packed: geglu_erf read from one packed gate/up tensor, in one pass
//
// Moves each operand once: packed 2 B/element, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel geglu_erf_packed, variant chunk.
// Source: https://arxiv.org/abs/2002.05202

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // threads along a column
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: neighbouring rows
#endif
#ifndef ONCE
#define ONCE 1  // 1 where the grid's second side holds all columns
#endif
#ifndef VEC
#define VEC 8  // columns of a pack, a divisor of every row and stride
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

// Good to 22 bits; below 2^-126 it is 0, a difference that no 16-bit result shows unless it is made of such numbers alone.
__device__ __forceinline__ float exp2_16bit(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The normal distribution function to 3e-4 of itself down to x = -5.7 and to 3e-3 down to x = -13.3, where bfloat16 ends, whose
// rounding costs 4e-3: 2 to the power of a polynomial in |x|, which is the minimax fit of log2(cdf(-|x|)). The sign of its last
// coefficient makes it -inf for x = -inf.
__device__ __forceinline__ float normal_cdf_16bit(float x) {
    float power = -4.6692085e-07f;
    power = fmaf(power, fabsf(x), 2.4229113e-05f);
    power = fmaf(power, fabsf(x), -0.0005259484f);
    power = fmaf(power, fabsf(x), 0.0063268477f);
    power = fmaf(power, fabsf(x), -0.047913346f);
    power = fmaf(power, fabsf(x), -0.4664553f);
    power = fmaf(power, fabsf(x), -1.1472828f);
    power = fmaf(power, fabsf(x), -1.0003203f);
    const float tail = exp2_16bit(power);
    return x < 0.0f ? tail : 1.0f - tail;
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_geglu_erf_packed_f783db(
    const bfloat16_bits* __restrict__ packed_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t packed_stride0,
    index_t packed_offset,
    index_t out_stride0) {
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<bfloat16_bits> packed_packs[PACKS];
        Pack<bfloat16_bits> packed_shifted_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            packed_packs[p] = load_pack(packed_ptr + (row * packed_stride0 + first), is_inside);
            packed_shifted_packs[p] = load_pack(packed_ptr + (row * packed_stride0 + first + packed_offset), is_inside);
        }
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            if (!is_inside) continue;
            Pack<bfloat16_bits> out_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float packed = to_float32(packed_packs[p], lane);
                const float packed_shifted = to_float32(packed_shifted_packs[p], lane);
                const float out = packed * normal_cdf_16bit(packed) * packed_shifted;
                out_pack[lane] = from_float32<bfloat16_bits>(out);
            }
            store_pack(out_ptr + (row * out_stride0 + first), out_pack);
        }
    }
}
