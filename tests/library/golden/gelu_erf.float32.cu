// gelu_erf: GELU with the exact Gaussian distribution function, in one pass
//
// Moves each operand once: x 4 B/element, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel gelu_erf, variant builtin.
// Source: https://arxiv.org/abs/1606.08415

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef VEC
#define VEC 4  // columns of a pack
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

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

extern "C" __global__ void __launch_bounds__(THREADS)
fa_gelu_erf_88d337(
    const float* __restrict__ x_ptr,
    float* __restrict__ out_ptr,
    index_t size) {
    const index_t first = ((index_t)blockIdx.x * THREADS + threadIdx.x) * VEC;
    if (first >= size) return;
    const unsigned lanes = lanes_before(size, first);
    const Pack<float> x_pack = load_pack(x_ptr + first, lanes);
    Pack<float> out_pack;
    #pragma unroll
    for (int lane = 0; lane < VEC; ++lane) {
        const float x = x_pack[lane];
        const float out = x * 0.5f * (erff(x * 0.7071067811865476f) + 1.0f);
        out_pack[lane] = out;
    }
    store_pack(out_ptr + first, out_pack, lanes);
}
