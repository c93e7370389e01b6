// The pass of kernels/cpu.py on a GPU: update V (and u), and write down what has a key of at least a floor.
//
// Compiled by CuPy (NVRTC) when it is first used, and by nvcc in a test; both with -fmad=false, so that products are
// rounded before they are added, as on the CPU. What passes is written in the order in which warps come: sort it.

namespace {

// What an update does, as in kernels/cpu.py.
enum Mode { PICK = 0, PLAIN = 1, MOMENTUM = 2, NESTEROV = 3 };

// So many elements of a thread are under way at once, enough to keep memory busy.
constexpr int ITEMS = 4;

__device__ int bits_of(float value) { return __float_as_int(value); }
__device__ long long bits_of(double value) { return __double_as_longlong(value); }

template <typename Real>
__device__ Real updated(int mode, const Real* given, Real* velocity, Real old, const Real* parameter, Real momentum,
                        Real decay, long long i) {
    Real g = given[i];
    if (parameter != nullptr) g = g + decay * parameter[i];
    if (mode == PLAIN) return old + g;
    const Real u = momentum * velocity[i] + g;
    velocity[i] = u;
    return mode == MOMENTUM ? old + u : old + (g + momentum * u);
}

// Each warp reserves places for all of its lanes with one atomic, and none where nothing passes.
template <typename Real, typename Key>
__device__ void advance(int mode, const Real* given, Real* velocity, Real* residual, const Real* parameter,
                        Real momentum, Real decay, long long numel, Key flip, Key mask, Key floor, int first,
                        int* indices, Real* values, int capacity, int* count) {
    const long long tile = static_cast<long long>(blockDim.x) * ITEMS;
    const int lane = threadIdx.x & 31;
    for (long long start = blockIdx.x * tile; start < numel; start += gridDim.x * tile) {
        Real v[ITEMS];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = start + item * static_cast<long long>(blockDim.x) + threadIdx.x;
            v[item] = 0;
            if (i < numel) {
                v[item] = residual[i];
                if (mode != PICK) {
                    v[item] = updated(mode, given, velocity, v[item], parameter, momentum, decay, i);
                    residual[i] = v[item];
                }
            }
        }
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const long long i = start + item * static_cast<long long>(blockDim.x) + threadIdx.x;
            const bool passes = i < numel && ((bits_of(v[item]) ^ flip) & mask) >= floor;
            const unsigned ballot = __ballot_sync(0xffffffffu, passes);
            if (ballot == 0) continue;
            int base = 0;
            if (lane == 0) base = atomicAdd(count, __popc(ballot));
            base = __shfl_sync(0xffffffffu, base, 0);
            const int place = base + __popc(ballot & ((1u << lane) - 1));
            if (passes && place < capacity) {
                indices[place] = first + static_cast<int>(i);
                values[place] = v[item];
            }
        }
    }
}

template <typename Real, typename Key>
__device__ void find_nonfinite(const Real* data, long long numel, Key mask, Key infinity, int* found) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    bool bad = false;
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < numel; i += stride) {
        bad |= (bits_of(data[i]) & mask) >= infinity;
    }
    if (bad) *found = 1;  // whoever is last writes the same
}

}  // namespace

extern "C" {

__global__ void advance_f32(int mode, const float* given, float* velocity, float* residual, const float* parameter,
                            float momentum, float decay, long long numel, int flip, int mask, int floor, int first,
                            int* indices, float* values, int capacity, int* count) {
    advance<float, int>(mode, given, velocity, residual, parameter, momentum, decay, numel, flip, mask, floor, first,
                        indices, values, capacity, count);
}

__global__ void advance_f64(int mode, const double* given, double* velocity, double* residual,
                            const double* parameter, double momentum, double decay, long long numel, long long flip,
                            long long mask, long long floor, int first, int* indices, double* values, int capacity,
                            int* count) {
    advance<double, long long>(mode, given, velocity, residual, parameter, momentum, decay, numel, flip, mask, floor,
                               first, indices, values, capacity, count);
}

__global__ void find_nonfinite_f32(const float* data, long long numel, int mask, int infinity, int* found) {
    find_nonfinite<float, int>(data, numel, mask, infinity, found);
}

__global__ void find_nonfinite_f64(const double* data, long long numel, long long mask, long long infinity,
                                   int* found) {
    find_nonfinite<double, long long>(data, numel, mask, infinity, found);
}

}  // extern "C"
