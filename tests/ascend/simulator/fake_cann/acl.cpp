// libascendcl.so and libacl_op_compiler.so of the simulated Ascend: device memory is host memory, and work is done when
// it is called for, so that streams and events are never behind. Compiled against the headers of the torch_npu wheel: a
// signature that changes there does not compile here.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <profiling/prof_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr aclError kOutOfMemory = 207001;  // ACL_ERROR_RT_MEMORY_ALLOCATION
constexpr aclError kNotSimulated = 500000;  // ACL_ERROR_INTERNAL_ERROR
constexpr aclError kNoContext = 107002;  // ACL_ERROR_RT_CONTEXT_NULL
constexpr size_t kAlignment = 512;

size_t number(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

size_t device_count() { return number("FAKE_CANN_DEVICES", 8); }
size_t device_memory() { return number("FAKE_CANN_MEMORY", size_t{64} << 30); }

thread_local int32_t device = -1;

struct Block {
  size_t bytes;
  int32_t device;
};

std::mutex guard;
std::map<void*, Block> blocks;
std::map<int32_t, size_t> held;

aclError allocate(void** pointer, size_t bytes) {
  const std::lock_guard<std::mutex> lock(guard);
  const size_t size = bytes == 0 ? kAlignment : bytes;
  if (held[device] + size > device_memory() || posix_memalign(pointer, kAlignment, size) != 0) return kOutOfMemory;
  // A fresh byte is never zero by luck: floats read before they are written are NaN.
  std::memset(*pointer, 0xFF, size);
  blocks[*pointer] = {size, device};
  held[device] += size;
  return ACL_SUCCESS;
}

aclError release(void* pointer) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = blocks.find(pointer);
  if (found == blocks.end()) return kNotSimulated;
  held[found->second.device] -= found->second.bytes;
  blocks.erase(found);
  std::free(pointer);
  return ACL_SUCCESS;
}

struct Event {
  std::chrono::steady_clock::time_point at;
};

std::atomic<int32_t> num_streams{1};

aclError new_stream(aclrtStream* stream) {
  *stream = new int32_t(num_streams++);
  return ACL_SUCCESS;
}

aclError new_event(aclrtEvent* event) {
  *event = new Event{};
  return ACL_SUCCESS;
}

aclError refuse(const char* what) {
  std::fprintf(stderr, "fake CANN: %s is not simulated\n", what);
  return kNotSimulated;
}

template <class Description>
Description* new_description() {
  return static_cast<Description*>(std::calloc(1, 64));
}

int64_t options[64];  // by the numbers of aclrtSysParamOpt

}  // namespace

extern "C" {

// What a symbol that is not simulated says (see refusals.c, which the build writes).
int fake_cann_refuse(const char* what) { return refuse(what); }

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclrtGetSocName() {
  const char* name = std::getenv("FAKE_CANN_SOC");
  return name == nullptr ? "Ascend910B1" : name;
}
const char* aclGetRecentErrMsg() { return "fake CANN: what it refused is on stderr"; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// Devices.
aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(device_count());
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= device_count()) return refuse("a device beyond FAKE_CANN_DEVICES");
  device = index;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* index) {
  if (device < 0) return kNoContext;
  *index = device;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  *flags = 0;
  *active = device >= 0;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  static int only;
  *context = &only;
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext) { return ACL_SUCCESS; }
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = options[option & 63];
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  options[option & 63] = value;
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

// The profiler is off.
uint64_t MsprofSysCycleTime() { return 0; }
uint64_t MsprofGetHashId(const char*, size_t) { return 1; }
int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }
int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }

// Memory.
aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
aclError aclrtFree(void* pointer) { return release(pointer); }
aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return posix_memalign(pointer, kAlignment, bytes == 0 ? kAlignment : bytes) == 0 ? ACL_SUCCESS : kOutOfMemory;
}
aclError aclrtFreeHost(void* pointer) {
  std::free(pointer);
  return ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* unused, size_t* total) {
  const std::lock_guard<std::mutex> lock(guard);
  *total = device_memory();
  *unused = *total - held[device];
  return ACL_SUCCESS;
}
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
  if (bytes > room) return refuse("a copy beyond its target");
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream) {
  return aclrtMemcpy(to, room, from, bytes, kind);
}
aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return refuse("a fill beyond its target");
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream) {
  return aclrtMemset(to, room, value, bytes);
}

// Streams and events.
aclError aclrtCreateStream(aclrtStream* stream) { return new_stream(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return new_stream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<int32_t*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream == nullptr ? 0 : *static_cast<int32_t*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return new_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return new_event(event); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->at = std::chrono::steady_clock::now();
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent first, aclrtEvent second) {
  const auto passed = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return ACL_SUCCESS;
}

// The compiler of single operators: asked for its options, never for an operator (see kernels.cpp and opapi.cpp).
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 2; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length > 0) *value = '\0';
  return ACL_SUCCESS;
}
// Descriptions of operators are made, and never read.
aclTensorDesc* aclCreateTensorDesc(aclDataType, int, const int64_t*, aclFormat) { return new_description<aclTensorDesc>(); }
void aclDestroyTensorDesc(const aclTensorDesc* description) { std::free(const_cast<aclTensorDesc*>(description)); }
aclDataBuffer* aclCreateDataBuffer(void*, size_t) { return new_description<aclDataBuffer>(); }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  std::free(const_cast<aclDataBuffer*>(buffer));
  return ACL_SUCCESS;
}
aclopAttr* aclopCreateAttr() { return new_description<aclopAttr>(); }
void aclopDestroyAttr(const aclopAttr* attributes) { std::free(const_cast<aclopAttr*>(attributes)); }
aclError aclopCompileAndExecute(const char* name, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return refuse(name);
}
aclError aclopCompileAndExecuteV2(const char* name, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return refuse(name);
}
}
