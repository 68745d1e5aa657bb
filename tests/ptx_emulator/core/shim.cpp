// Stand-ins for the CUDA entry points that the host code of a CuTe DSL function calls. The host code computes grid,
// shared memory, parameters and tensor maps as on a GPU; its launches go to a callback.
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>

namespace {
struct Dim { unsigned x, y, z; };
struct LaunchSettings { Dim grid, block; size_t shared_bytes; void* stream; void* attributes; unsigned attribute_count; };
using Callback = int (*)(const char* name, const unsigned* grid_and_block, size_t shared_bytes, void** arguments);
using MemsetCallback = int (*)(void* target, int value, size_t bytes);
Callback on_launch;
MemsetCallback on_memset;
std::unordered_map<std::string, std::string> names;  // node-based: the addresses of names stay valid
struct LaunchAttribute { int id; char padding[4]; union { Dim cluster; char bytes[64]; }; };
constexpr int CLUSTER_DIMENSION = 4;
const char* message = "the emulated launch failed";
constexpr int ATTRIBUTE_SM_COUNT = 16, ATTRIBUTE_MAX_SHARED = 97, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76;
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void emulator_set_callbacks(Callback launch, MemsetCallback fill) { on_launch = launch; on_memset = fill; }
int _cudaLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  static int loaded;
  *library = &loaded;
  return 0;
}
int _cudaLibraryUnload(void*) { return 0; }
int _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  auto [place, fresh] = names.try_emplace(name, name);
  (void)fresh;
  *kernel = (void*)place->second.c_str();
  return 0;
}
int _cudaFuncSetAttribute(void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }
int _cuKernelGetAttribute(int* value, int, void*, int) { *value = 0; return 0; }
int _cudaGetDevice(int* device) { *device = 0; return 0; }
int _cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int _cudaSetDevice(int) { return 0; }
int _cuDeviceGet(int* device, int index) { *device = index; return 0; }
int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case ATTRIBUTE_SM_COUNT: *value = 148; break;
    case ATTRIBUTE_MAX_SHARED: *value = 232448; break;
    case ATTRIBUTE_MAJOR: *value = 10; break;
    default: *value = 0;
  }
  return 0;
}
const char* _cudaGetErrorString(int) { return message; }
const char* _cudaGetErrorName(int) { return "emulatorError"; }
int _cudaLaunchKernelEx(const LaunchSettings* s, const void* kernel, void** arguments) {
  message = "the emulated launch failed";
  for (unsigned i = 0; i < s->attribute_count; i++) {
    const LaunchAttribute& attribute = ((const LaunchAttribute*)s->attributes)[i];
    const Dim& cluster = attribute.cluster;
    if (attribute.id == CLUSTER_DIMENSION && cluster.x * cluster.y * cluster.z > 1) {
      message = "clusters of more than one CTA are not modelled by the emulator";
      return 1;
    }
  }
  unsigned sizes[6] = {s->grid.x, s->grid.y, s->grid.z, s->block.x, s->block.y, s->block.z};
  return on_launch ? on_launch((const char*)kernel, sizes, s->shared_bytes, arguments) : 1;
}
int _cudaMemsetAsync(void* target, int value, size_t bytes, void*) {
  return on_memset ? on_memset(target, value, bytes) : 1;
}
// tvm-ffi calls this at every launch; it must run init and load once, with arguments packed as pointers.
int cuda_dialect_init_library_once(void** state, void (*init)(void**), void (*load)(void**), void*) {
  if (*state) return 0;
  void* library = nullptr;
  void** holder = &library;
  int error = 0, device = 0;
  void* init_arguments[] = {&holder, &error};
  init(init_arguments);
  if (error) return error;
  void* load_arguments[] = {&holder, &device, &error};
  load(load_arguments);
  if (error) return error;
  *state = library;
  return 0;
}
void cuda_dialect_unload_library_once(void**) {}
// A Python function here would be called after the interpreter is gone.
void emulator_keep(void*) {}
}
