// A CUDA runtime for a machine without a GPU, loaded before PyTorch's own.
//
// Memory is the host's. A kernel does nothing but be counted, and so are waits of the host. All
// happens at once: a stream has nothing to do when anybody asks it.
//
// PyTorch's libraries look every name up among the libraries that are loaded; this one comes first.
// What is not here they find in the real runtime, which answers that there is no device. Here is
// what tests and benchmarks call: `gcc --coverage` shows it.

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

// Not a number, in each floating-point type: it shows memory that is read before it is written.
enum { UNWRITTEN = 0xFF };

// ---- what has happened

API long simulated_launches, simulated_waits;
API long simulated_bytes, simulated_peak; // of memory on the device, now and at most

static int is_capturing; // a stream records a graph: the host must neither wait nor ask

static cudaError_t wait_for_device(void) {
    if (is_capturing) return cudaErrorStreamCaptureUnsupported;
    simulated_waits++;
    return cudaSuccess;
}

// ---- the device

API cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
API cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    (void)device;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simulated GPU");
    p->major = 9;
    p->warpSize = 32;
    p->totalGlobalMem = 8L << 30;
    p->multiProcessorCount = 132;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
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
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize(void) { return wait_for_device(); }
API cudaError_t cudaGetLastError(void) { return cudaSuccess; }

// ---- memory: ranges that are pinned or the device's are remembered, to tell them from all other

enum { PINNED, ON_DEVICE };

typedef struct { char *start; size_t size; int kind; } Range;

static Range *ranges;
static long n_ranges, room_for_ranges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t allocate(void **p, size_t size, int kind) {
    *p = aligned_alloc(512, (size + 511) / 512 * 512);
    if (!*p) return cudaErrorMemoryAllocation;
    memset(*p, UNWRITTEN, size);
    pthread_mutex_lock(&lock);
    if (n_ranges == room_for_ranges) {
        room_for_ranges = room_for_ranges ? 2 * room_for_ranges : 4096;
        ranges = realloc(ranges, room_for_ranges * sizeof *ranges);
    }
    ranges[n_ranges++] = (Range){*p, size, kind};
    if (kind == ON_DEVICE) simulated_bytes += size;
    if (simulated_bytes > simulated_peak) simulated_peak = simulated_bytes;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static long index_of(const char *address) { // -1: not among the ranges
    for (long i = n_ranges - 1; i >= 0; i--)
        if (address >= ranges[i].start && address < ranges[i].start + ranges[i].size) return i;
    return -1;
}

static cudaError_t release(void *p) {
    pthread_mutex_lock(&lock);
    long i = index_of(p);
    if (i >= 0) {
        if (ranges[i].kind == ON_DEVICE) simulated_bytes -= ranges[i].size;
        ranges[i] = ranges[--n_ranges];
        free(p);
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void **p, size_t size) { return allocate(p, size, ON_DEVICE); }
API cudaError_t cudaFree(void *p) { return release(p); }
API cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) {
    (void)flags;
    return allocate(p, size, PINNED);
}
API cudaError_t cudaFreeHost(void *p) { return release(p); }
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    pthread_mutex_lock(&lock);
    long i = index_of(p);
    int is_on_device = i >= 0 && ranges[i].kind == ON_DEVICE;
    pthread_mutex_unlock(&lock);
    a->type = is_on_device ? cudaMemoryTypeDevice
              : i >= 0     ? cudaMemoryTypeHost
                           : cudaMemoryTypeUnregistered;
    a->device = i >= 0 ? 0 : -2;
    a->devicePointer = a->hostPointer = i >= 0 ? (void *)p : NULL;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                                cudaStream_t s) {
    (void)kind, (void)s;
    memmove(to, from, size);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *p, int byte, size_t size, cudaStream_t s) {
    (void)s;
    memset(p, byte, size);
    return cudaSuccess;
}

// ---- kernels: registered when a library is loaded, launched as compilers of CUDA 13 do

API void __cudaRegisterFunction(void) {}
API void **__cudaRegisterFatBinary(void) { static void *handle[1]; return handle; }
API void __cudaRegisterFatBinaryEnd(void) {}
API void __cudaUnregisterFatBinary(void) {}
API void __cudaRegisterVar(void) {}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) {
    *kernel = (cudaKernel_t)f;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(void) {
    simulated_launches++;
    return cudaSuccess;
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } next_call;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    next_call.grid = grid, next_call.block = block;
    next_call.shared = shared, next_call.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = next_call.grid, *block = next_call.block;
    *shared = next_call.shared, *stream = next_call.stream;
    return cudaSuccess;
}

// ---- streams, events, and graphs, which hold nothing: the launch of one is one launch

static void *handle(void) { return malloc(1); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    (void)flags, (void)priority;
    *s = handle();
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { (void)s; return wait_for_device(); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    (void)s, (void)e, (void)flags;
    return cudaSuccess;
}
static enum cudaStreamCaptureStatus capture_status(void) {
    return is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    (void)s;
    *status = capture_status();
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *n) {
    (void)s, (void)graph, (void)nodes, (void)edges, (void)n;
    *status = capture_status();
    if (id) *id = is_capturing;
    return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    (void)s, (void)mode;
    is_capturing = 1;
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    (void)s;
    is_capturing = 0;
    *graph = handle();
    return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) {
    (void)g, (void)nodes;
    *n = 1;
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g,
                                              unsigned long long flags) {
    (void)g, (void)flags;
    *e = handle();
    return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    (void)e, (void)s;
    simulated_launches++;
    return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g); return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    (void)flags;
    *e = handle();
    return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    (void)e, (void)s, (void)flags;
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
    (void)e;
    return is_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { (void)e; return wait_for_device(); }

// ---- the driver: PyTorch finds it by its name, libcuda.so.1, which this library has too

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    (void)device;
    *flags = 0, *is_active = 1;
    return 0;
}
static int succeed(void) { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
    (void)version, (void)flags;
    int is_state = !strcmp(name, "cuDevicePrimaryCtxGetState");
    *f = is_state ? (void *)cuDevicePrimaryCtxGetState : (void *)succeed;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
