// A device guard and hooks that let any build of torch run autograd on fake `cuda` tensors, without a GPU.
//
// torch asks a device type for two things before a backward: the current device and stream of a thread (the guard), and
// whether a build for that type is present (the hooks). Here both are thread-local numbers. No memory is allocated and
// no kernel runs: the tensors are fake, and harness.virtual_gpu records what would have run.
//
// Load this library before torch, which asks for the hooks once, when it is imported, and call virtual_gpu_install after
// that: a CUDA build of torch installs a guard of its own when it is imported, and torch asks the one installed last.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex kDevices = 8;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kDevices] = {0};

DeviceIndex exchange(DeviceIndex device) {
  const DeviceIndex before = current_device;
  if (device >= 0) {
    current_device = device;
  }
  return before;
}

struct VirtualGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return Device(DeviceType::CUDA, exchange(device.index())); }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
  Stream getStream(Device device) const override {
    const DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    const DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const DeviceIndex index = stream.device_index();
    const Stream before(Stream::UNSAFE, stream.device(), current_streams[index]);
    current_streams[index] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

}  // namespace

// The name of a class of hooks is its key in torch's registry. Versions of torch differ in the functions they have, so
// none is marked as overriding.
namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const {}
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasCUDA() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const { return true; }
  DeviceIndex deviceCount() const { return kDevices; }
  int getNumGPUs() const { return kDevices; }
  DeviceIndex current_device() const { return ::current_device; }
  DeviceIndex getCurrentDevice() const { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const { exchange(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const { return exchange(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return exchange(device); }
  bool isPinnedPtr(const void*) const { return false; }
  Allocator* getPinnedMemoryAllocator() const { return c10::GetDefaultCPUAllocator(); }
};

// A CUDA build of torch registers hooks under the same key, with the priority by default, and skips them for these.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at

// Called from Python through ctypes.
extern "C" {
void virtual_gpu_install() { c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, new VirtualGuard()); }
int virtual_gpu_get_device() { return current_device; }
void virtual_gpu_set_device(int device) { exchange(static_cast<DeviceIndex>(device)); }
long virtual_gpu_get_stream(int device) { return current_streams[device]; }
void virtual_gpu_set_stream(int device, long stream) { current_streams[device] = stream; }
}
