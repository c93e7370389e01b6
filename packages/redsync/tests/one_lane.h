// Enough of CUDA for advance.cu to run on a CPU, with one block of one thread: a warp of one lane.
#pragma once
#include <cstring>
#define __device__
#define __global__
struct Dim { unsigned x; };
static const Dim blockIdx{0}, threadIdx{0}, blockDim{1}, gridDim{1};
static int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
static long long __double_as_longlong(double value) { long long bits; std::memcpy(&bits, &value, 8); return bits; }
static unsigned __ballot_sync(unsigned, bool passes) { return passes; }
static int __shfl_sync(unsigned, int value, int) { return value; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int atomicAdd(int* place, int value) { const int old = *place; *place += value; return old; }
