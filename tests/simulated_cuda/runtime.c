// A CUDA runtime and driver for a machine without a GPU, loaded before PyTorch's own.
//
// Memory is the host's. A kernel does nothing but be counted. So are waits of the host, copies, and
// copies from or to memory that is not pinned, for which a real runtime makes the host wait. All
// happens at once: a stream has nothing to do when anybody asks it.
//
// PyTorch's libraries look every name up among the libraries that are loaded; this one comes first.
// What is not here they find in the real runtime, which answers that there is no device.

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

// Not a number, in each floating-point type: who computes with memory that nobody has written sees it.
enum { UNWRITTEN = 0xFF };
enum { GIB = 8, COMPUTE_CAPABILITY = 9, N_PROCESSORS = 132, SHARED_MEMORY = 232448 };

// ---- what has happened

API long simulated_launches, simulated_waits, simulated_copies, simulated_pageable_copies;
API long simulated_bytes, simulated_peak; // of memory on devices, now and at most

static int is_capturing; // a stream records a graph: the host must neither wait nor ask

static cudaError_t wait_for_device(void) {
    if (is_capturing) return cudaErrorStreamCaptureUnsupported;
    simulated_waits++;
    return cudaSuccess;
}

// ---- devices: as many as SIMULATED_CUDA_DEVICES says, none where CUDA_VISIBLE_DEVICES hides them

static __thread int current_device;

static int n_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *n = getenv("SIMULATED_CUDA_DEVICES");
    if (visible && !*visible) return 0;
    return n ? atoi(n) : 1;
}

API cudaError_t cudaGetDeviceCount(int *n) {
    *n = n_devices();
    return *n ? cudaSuccess : cudaErrorNoDevice;
}
API cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= n_devices()) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    (void)device;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simulated GPU");
    p->major = COMPUTE_CAPABILITY;
    p->warpSize = 32;
    p->totalGlobalMem = (size_t)GIB << 30;
    p->multiProcessorCount = N_PROCESSORS;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = SHARED_MEMORY;
    p->sharedMemPerMultiprocessor = 233472;
    p->l2CacheSize = 50 << 20;
    p->maxBlocksPerMultiProcessor = 32;
    for (int i = 0; i < 3; i++) {
        p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        p->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    (void)device;
    *value = which == cudaDevAttrComputeCapabilityMajor ? COMPUTE_CAPABILITY : 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
    snprintf(id, n, "0000:%02x:00.0", device);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { (void)a, (void)b; *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize(void) { return wait_for_device(); }
API cudaError_t cudaGetLastError(void) { return cudaSuccess; }
API cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

// ---- memory: ranges that are pinned or a device's are remembered, to tell them from all other

enum { PAGEABLE = -2, PINNED = -1 };  // 0 and more: the number of a device

typedef struct { char *start; size_t size; int owner; } Range;

static Range *ranges;
static long n_ranges, room_for_ranges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void remember(void *start, size_t size, int owner) {
    pthread_mutex_lock(&lock);
    if (n_ranges == room_for_ranges) {
        room_for_ranges = room_for_ranges ? 2 * room_for_ranges : 4096;
        ranges = realloc(ranges, room_for_ranges * sizeof *ranges);
    }
    ranges[n_ranges++] = (Range){start, size, owner};
    if (owner >= 0) simulated_bytes += size;
    if (simulated_bytes > simulated_peak) simulated_peak = simulated_bytes;
    pthread_mutex_unlock(&lock);
}

static int forget(void *start) {
    int is_known = 0;
    pthread_mutex_lock(&lock);
    for (long i = n_ranges - 1; i >= 0 && !is_known; i--)
        if (ranges[i].start == start) {
            if (ranges[i].owner >= 0) simulated_bytes -= ranges[i].size;
            ranges[i] = ranges[--n_ranges];
            is_known = 1;
        }
    pthread_mutex_unlock(&lock);
    return is_known;
}

static int owner_of(const void *address) {
    int owner = PAGEABLE;
    pthread_mutex_lock(&lock);
    for (long i = n_ranges - 1; i >= 0 && owner == PAGEABLE; i--)
        if ((char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].size)
            owner = ranges[i].owner;
    pthread_mutex_unlock(&lock);
    return owner;
}

static cudaError_t allocate(void **p, size_t size, int owner) {
    *p = aligned_alloc(512, (size + 511) / 512 * 512);
    if (!*p) return cudaErrorMemoryAllocation;
    memset(*p, UNWRITTEN, size);
    remember(*p, size, owner);
    return cudaSuccess;
}

static cudaError_t release(void *p) {
    if (forget(p)) free(p);
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void **p, size_t size) { return allocate(p, size, current_device); }
API cudaError_t cudaFree(void *p) { return release(p); }
API cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { (void)s; return allocate(p, size, current_device); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { (void)s; return release(p); }
API cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { (void)flags; return allocate(p, size, PINNED); }
API cudaError_t cudaMallocHost(void **p, size_t size) { return allocate(p, size, PINNED); }
API cudaError_t cudaFreeHost(void *p) { return release(p); }
API cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) {
    (void)flags;
    remember(p, size, PINNED);
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *p) { forget(p); return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = (size_t)GIB << 30; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    int owner = owner_of(p);
    memset(a, 0, sizeof *a);
    a->type = owner >= 0 ? cudaMemoryTypeDevice : owner == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->device = owner == PAGEABLE ? -2 : owner == PINNED ? 0 : owner;
    a->devicePointer = a->hostPointer = owner == PAGEABLE ? NULL : (void *)p;
    return cudaSuccess;
}

// ---- copies

static cudaError_t copy(void *to, const void *from, size_t size) {
    if (!size) return cudaSuccess;  // PyTorch copies what an empty tensor held before it grows
    int source = owner_of(from), target = owner_of(to);
    int is_pageable = (source >= 0 && target == PAGEABLE) || (source == PAGEABLE && target >= 0);
    simulated_copies++;
    simulated_pageable_copies += is_pageable;
    memmove(to, from, size);
    return cudaSuccess;
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    (void)kind;
    wait_for_device();
    return copy(to, from, size);
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) {
    (void)kind, (void)s;
    return copy(to, from, size);
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t s) {
    (void)a, (void)b, (void)s;
    return copy(to, from, size);
}
API cudaError_t cudaMemset(void *p, int byte, size_t size) { memset(p, byte, size); return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void *p, int byte, size_t size, cudaStream_t s) {
    (void)s;
    memset(p, byte, size);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
    (void)symbol, (void)from, (void)size, (void)offset, (void)kind;
    return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { (void)symbol; return allocate(p, 1 << 16, current_device); }

// ---- kernels

API void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name,
                                int limit, uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp) {
    (void)binary, (void)function, (void)name, (void)device_function, (void)limit, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
}
API void **__cudaRegisterFatBinary(void *binary) { static void *handle[1]; (void)binary; return handle; }
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {
    (void)h, (void)host, (void)device, (void)name, (void)ext, (void)size, (void)constant, (void)global;
}

static cudaError_t launch(const void *function) {
    (void)function;
    simulated_launches++;
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    (void)grid, (void)block, (void)args, (void)shared, (void)s;
    return launch(f);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
    (void)config, (void)args;
    return launch(f);
}

// What compilers of CUDA 13 write in place of the call above.
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    (void)grid, (void)block, (void)args, (void)shared, (void)s;
    return launch((void *)k);
}
API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return __cudaLaunchKernel(k, grid, block, args, shared, s);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } next_call;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    next_call.grid = grid, next_call.block = block, next_call.shared = shared, next_call.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = next_call.grid, *block = next_call.block, *shared = next_call.shared, *(void **)stream = next_call.stream;
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    (void)f;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 10 * COMPUTE_CAPABILITY;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute which, int value) {
    (void)f, (void)which, (void)value;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
    (void)f, (void)block, (void)shared, (void)flags;
    *n = 2;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}

// ---- streams and events

static void *handle(void) { return malloc(1); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { (void)flags, (void)priority; *s = handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { (void)flags; *s = handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = handle(); return cudaSuccess; }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { free(s); return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t s) { (void)s; return is_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { (void)s; *priority = 0; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { (void)s; return wait_for_device(); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { (void)s, (void)e, (void)flags; return cudaSuccess; }
static enum cudaStreamCaptureStatus capture_status(void) {
    return is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    (void)s;
    *status = capture_status();
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
    (void)s, (void)graph, (void)nodes, (void)edges, (void)n;
    *status = capture_status();
    if (id) *id = is_capturing;
    return cudaSuccess;
}
// A graph holds nothing; its launch is one launch.
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { (void)s, (void)mode; is_capturing = 1; return cudaSuccess; }
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) { (void)s; is_capturing = 0; *graph = handle(); return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { (void)g, (void)nodes; *n = 1; return cudaSuccess; }
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { (void)g, (void)flags; *e = handle(); return cudaSuccess; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { (void)g, (void)flags; *e = handle(); return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { (void)e, (void)s; simulated_launches++; return cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g); return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { (void)mode; return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { (void)flags; *e = handle(); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = handle(); return cudaSuccess; }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { (void)e, (void)s; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { (void)e, (void)s, (void)flags; return cudaSuccess; }
API cudaError_t cudaEventQuery(cudaEvent_t e) { (void)e; return is_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { (void)e; return wait_for_device(); }
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { (void)a, (void)b; *ms = 1; return cudaSuccess; }

// ---- the driver: found by its name, libcuda.so.1, which this library has too

static CUresult nothing(void) { return CUDA_SUCCESS; }

API CUresult cuInit(unsigned flags) { (void)flags; return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { *n = n_devices(); return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *device, int i) { *device = i; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    (void)device;
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = COMPUTE_CAPABILITY; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = N_PROCESSORS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_MEMORY; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) { (void)device; *flags = 0; *is_active = 1; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { (void)device; *context = (CUcontext)1; return CUDA_SUCCESS; }
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) { (void)s; *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) { (void)context; return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *device) { *device = current_device; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit limit, size_t value) { (void)limit, (void)value; return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { (void)limit; *value = 0; return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult result, const char **text) { (void)result; *text = "from the simulated driver"; return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr p) { (void)which; *(CUdeviceptr *)value = p; return CUDA_SUCCESS; }
API CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **values, CUdeviceptr p) { (void)n, (void)which, (void)values, (void)p; return CUDA_SUCCESS; }

// What Triton has compiled, and launches.
API CUresult cuModuleLoad(CUmodule *module, const char *path) { (void)path; *module = (CUmodule)1; return CUDA_SUCCESS; }
API CUresult cuModuleLoadData(CUmodule *module, const void *image) { (void)image; *module = (CUmodule)1; return CUDA_SUCCESS; }
API CUresult cuModuleUnload(CUmodule module) { (void)module; return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) { (void)module; *f = (CUfunction)strdup(name); return CUDA_SUCCESS; }
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
    (void)f;
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) { (void)f, (void)which, (void)value; return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { (void)f, (void)config; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) { (void)f, (void)config; *n = 1; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) { (void)f, (void)block, (void)shared; *n = 2; return CUDA_SUCCESS; }
API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **args, void **extra) {
    (void)config, (void)f, (void)args, (void)extra;
    simulated_launches++;
    return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream s, void **args, void **extra) {
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)s;
    return cuLaunchKernelEx(NULL, f, args, extra);
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
    (void)version, (void)flags;
    *f = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)cuDevicePrimaryCtxGetState;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
