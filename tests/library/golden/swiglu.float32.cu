// swiglu: silu(gate) * up, the gated activation of Llama-like MLPs
//
// Moves each operand once: gate 4 B/element, up 4 B/element, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel swiglu, variant builtin.
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

// VEC neighbours in a row: one 16-byte access (or two). The launch sees to it that rows hold whole packs and are aligned.
template <typename T>
struct alignas(sizeof(T) * VEC < 16 ? sizeof(T) * VEC : 16) Pack {
    T at[VEC];
    __device__ __forceinline__ T& operator[](int lane) { return at[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return at[lane]; }
};

// Zeros, unread, where it is not wanted.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, bool is_wanted = true) {
    return is_wanted ? *reinterpret_cast<const Pack<T>*>(from) : Pack<T>{};
}

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) { *reinterpret_cast<Pack<T>*>(to) = pack; }

// For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(THREADS)
fa_swiglu_729540(
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
            const float up = up_packs[p][lane];
            const float out = gate * sigmoid(gate) * up;
            out_pack[lane] = out;
        }
        store_pack(out_ptr + first, out_pack);
    }
}
