// softcap: cap * tanh(x / cap), in one pass
//
// Moves each operand once: x 2 B/element, out 2 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel softcap, variant tanh.
// Source: https://arxiv.org/abs/2408.00118

#ifndef THREADS
#define THREADS 256  // threads of a block
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread
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

// For results that are rounded to 11 bits at most: 2 sigmoid(2x) - 1, whose root takes no division, and two terms of the series where
// that would cancel. Either is good to 1e-5 of itself.
__device__ __forceinline__ float tanh_16bit(float x) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(1.0f + exp2_16bit(x * -2.8853900817779268f)));
    return fabsf(x) < 0.08f ? x * fmaf(x * x, -0.3333333333f, 1.0f) : fmaf(2.0f * root, root, -1.0f);
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS)
fa_softcap_59fad3(
    const bfloat16_bits* __restrict__ x_ptr,
    bfloat16_bits* __restrict__ out_ptr,
    index_t size) {
    const float cap = 30.0f;
    Pack<bfloat16_bits> x_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        const bool is_inside = first < size;
        x_packs[p] = load_pack(x_ptr + first, is_inside);
    }
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        const bool is_inside = first < size;
        if (!is_inside) continue;
        Pack<bfloat16_bits> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = to_float32(x_packs[p], lane);
            const float out = cap * tanh_16bit(x * (1.0f / cap));
            out_pack[lane] = from_float32<bfloat16_bits>(out);
        }
        store_pack(out_ptr + first, out_pack);
    }
}
