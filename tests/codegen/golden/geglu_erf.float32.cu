// geglu_erf: gelu(gate) * up with the exact GELU, in one pass
//
// Moves each operand once: gate 4 B/element, up 4 B/element, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel geglu_erf, variant builtin.
// Source: https://arxiv.org/abs/2002.05202

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

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS)
fa_geglu_erf_72010c(
    const float* __restrict__ gate_ptr,
    const float* __restrict__ up_ptr,
    float* __restrict__ out_ptr,
    index_t size) {
    Pack<float> gate_packs[PACKS];
    Pack<float> up_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        const bool is_inside = first < size;
        gate_packs[p] = load_pack(gate_ptr + first, is_inside);
        up_packs[p] = load_pack(up_ptr + first, is_inside);
    }
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;
        const bool is_inside = first < size;
        if (!is_inside) continue;
        Pack<float> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float gate = gate_packs[p][lane];
            const float product = gate * 0.5f * erfcf(gate * -0.7071067811865476f);
            const float up = up_packs[p][lane];
            const float out = product * up;
            out_pack[lane] = out;
        }
        store_pack(out_ptr + first, out_pack);
    }
}
