// dropout_add: dropout and residual add in one pass; the same seed drops the same elements
//
// Moves each operand once: residual 4 B/element, x 4 B/element, seed 8 B in all, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below
// 429496730, p = 0.1 of 2**32; the others are scaled by 1 / (1 - p).
// Origin: library kernel dropout_add, variant seeded.
// Source: https://doi.org/10.1145/2063384.2063405

#ifndef THREADS
#define THREADS 256  // threads of a block
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread
#endif
#ifndef VEC
#define VEC 4  // columns of a pack, a divisor of every row and stride
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

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

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS)
fa_dropout_add_4e8310(
    const float* __restrict__ residual_ptr,
    const float* __restrict__ x_ptr,
    const long long* __restrict__ seed_ptr,
    float* __restrict__ out_ptr,
    index_t size) {
    const long long seed = seed_ptr[0];
    Pack<float> residual_packs[PACKS];
    Pack<float> x_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        const bool is_inside = first < size;
        residual_packs[p] = load_pack(residual_ptr + first, is_inside);
        x_packs[p] = load_pack(x_ptr + first, is_inside);
    }
    unsigned kept[PACKS];  // a bit for each column
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        kept[p] = kept_bits(seed, first, 429496730u);
    }
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        const bool is_inside = first < size;
        if (!is_inside) continue;
        Pack<float> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float residual = residual_packs[p][lane];
            const float x = x_packs[p][lane];
            const float factor = kept[p] >> lane & 1 ? 1.1111111111111112f : 0.0f;
            const float out = residual + x * factor;
            out_pack[lane] = out;
        }
        store_pack(out_ptr + first, out_pack);
    }
}
