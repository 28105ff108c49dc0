// Kernels of the simulated Ascend. Every aten operator for which torch_npu registers a kernel runs PyTorch's CPU kernel
// over the same bytes. Storage and views stay torch_npu's own, and so do the operators that PyTorch has for no other
// device. One without an NPU kernel, which torch_npu would run on the host with a warning, is refused, and so is a host
// tensor among device tensors.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AllocatorConfig.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

std::string name_of(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
}

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

// A host tensor over the bytes of a device tensor. Its storage may grow, for operators that write into `out`.
Tensor host_view(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  const c10::Storage& storage = tensor.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr bytes(storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                     c10::Device(c10::kCPU));
  c10::Storage on_host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes),
                       c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(std::move(on_host), c10::DispatchKeySet(DispatchKey::CPU),
                                                         tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

Tensor device_view(const Tensor& like, const Tensor& host) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(like.storage()),
                                                         c10::DispatchKeySet(DispatchKey::PrivateUse1), host.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  if (host.is_conj()) view._set_conj(true);
  if (host.is_neg()) view._set_neg(true);
  return view;
}

struct WithoutAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset |
                                           c10::DispatchKeySet(DispatchKey::ADInplaceOrView)};
};

// While it lives, the host's generator draws from the seed and offset of the device's, which moves on.
class DrawsFromDevice {
 public:
  explicit DrawsFromDevice(std::optional<at::Generator> device) {
    if (!device) return;
    lock_ = std::unique_lock<std::mutex>(mutex_);
    host_ = at::detail::getDefaultCPUGenerator();
    saved_ = Tensor(host_.unsafeGetGeneratorImpl()->get_state());
    const uint64_t seed = device->current_seed();
    const uint64_t offset = device->get_offset();
    device->set_offset(offset + 4);
    host_.set_current_seed(seed * 6364136223846793005ULL + offset * 1442695040888963407ULL);
  }
  ~DrawsFromDevice() {
    if (saved_.defined()) host_.unsafeGetGeneratorImpl()->set_state(*saved_.unsafeGetTensorImpl());
  }
  DrawsFromDevice(const DrawsFromDevice&) = delete;
  DrawsFromDevice& operator=(const DrawsFromDevice&) = delete;

 private:
  static inline std::mutex mutex_;
  std::unique_lock<std::mutex> lock_;
  at::Generator host_;
  Tensor saved_;
};

// Operators that take host tensors beside those of the device, as they do for every device of PyTorch.
const std::set<std::string> kMixed = {
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_foreach_copy_",
    "aten::_amp_foreach_non_finite_check_and_unscale_",
};

// One call: its tensors as the host sees them, and the way back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), name_(name_of(op.schema())), stack_(stack) {
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack->size() - count; i < stack->size(); i++) take((*stack)[i]);
    TORCH_CHECK(host_arguments_ == 0 || index_ < 0 || kMixed.count(name_) > 0,
                "Expected all tensors to be on the same device, but found at least two devices, npu:", index_,
                " and cpu! (", name_, ")");
    if (index_ < 0) index_ = c10::impl::getDeviceGuardImpl(kNpu)->getDevice().index();
  }

  void run() {
    std::optional<at::Generator> generator;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      generator = generator_ ? *generator_ : at::globalContext().defaultGenerator(c10::Device(kNpu, index_));
    }
    {
      const DrawsFromDevice draws(generator);
      op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack_);
    }
    for (const Pair& pair : pairs_) write_back(pair);
    const size_t count = op_.schema().returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); i++) give((*stack_)[i]);
  }

 private:
  struct Pair {
    Tensor device;
    Tensor host;
  };

  void take(IValue& value) {
    if (value.isTensor()) {
      value = to_host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<Tensor>(to_host(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kNpu) {
      const c10::Device wanted = value.toDevice();
      if (index_ < 0) {
        index_ = wanted.has_index() ? wanted.index() : c10::impl::getDeviceGuardImpl(kNpu)->getDevice().index();
      }
      makes_on_device_ = true;
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kNpu) {
      generator_ = value.toGenerator();
      value = IValue();
    }
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      host_arguments_ += tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    const auto index = tensor.device().index();
    TORCH_CHECK(index_ < 0 || index_ == index || tensor.dim() == 0,
                "Expected all tensors to be on the same device, but found npu:", index_, " and npu:",
                static_cast<int>(index), " (", name_, ")");
    if (index_ < 0) index_ = index;
    for (const Pair& pair : pairs_) {
      if (pair.device.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return pair.host;
    }
    pairs_.push_back({tensor, host_view(tensor)});
    return pairs_.back().host;
  }

  // An operator that resized its argument left the result in memory of the host.
  static void write_back(const Pair& pair) {
    const Tensor& host = pair.host;
    const Tensor& device = pair.device;
    if (host.sizes() == device.sizes() && host.strides() == device.strides() &&
        host.const_data_ptr() == device.const_data_ptr()) {
      return;
    }
    device.resize_(host.sizes());
    if (host.numel() == 0) return;
    if (device.strides() != host.strides()) device.as_strided_(host.sizes(), host.strides());
    host_view(device).copy_(host);
  }

  void give(IValue& value) {
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      value = list;
    }
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (const Pair& pair : pairs_) {
      if (pair.host.unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) return pair.device;
    }
    for (const Pair& pair : pairs_) {
      if (host.numel() > 0 && pair.host.has_storage() && host.has_storage() &&
          pair.host.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) {
        return device_view(pair.device, host);
      }
    }
    if (pairs_.empty() && !makes_on_device_) return host;
    Tensor made = at::empty_strided(host.sizes(), host.strides(), host.options().device(c10::Device(kNpu, index_)));
    if (host.numel() > 0) host_view(made).copy_(host);
    return made;
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  Stack* stack_;
  std::vector<Pair> pairs_;
  int index_ = -1;  // of the device that the call runs on
  int host_arguments_ = 0;
  bool makes_on_device_ = false;
  std::optional<at::Generator> generator_;
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const WithoutAutograd without;
  Call(op, stack).run();
}

void refuse(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "fake CANN: ", name_of(op.schema()),
                              " has no NPU kernel; torch_npu would run it on the host");
}

Tensor& copy(Tensor& self, const Tensor& source, bool) {
  const WithoutAutograd without;
  Tensor target = host_view(self);
  target.copy_(host_view(source));
  return self;
}

at::Scalar local_scalar(const Tensor& tensor) { return at::_local_scalar_dense(host_view(tensor)); }

// What decides where bytes lie and how they are seen: torch_npu's own code, over the allocator.
const std::set<std::string> kStorage = {
    "empty.memory_format", "empty_strided", "new_empty_strided", "empty_like", "as_strided", "as_strided_", "view",
    "_reshape_alias", "resize_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor", "is_set_to", "squeeze", "squeeze.dim", "unsqueeze", "unfold", "record_stream", "is_pinned",
    "_pin_memory", "resize_as_", "_to_copy", "_lazy_clone",
};

constexpr DispatchKey kDefaults[] = {
    DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional,
    DispatchKey::CompositeImplicitAutograd, DispatchKey::CompositeImplicitAutogradNestedTensor,
};

bool has_default(const c10::OperatorHandle& op) {
  for (const DispatchKey key : kDefaults) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

std::unique_ptr<torch::Library> library;
std::unordered_set<std::string> keys_of_cuda;

}  // namespace

extern "C" {

// PyTorch's build for CUDA, which is what PyPI has for x86-64, has registered options of the allocator that torch_npu
// registers too, and the second is refused. (Ascend machines run the build for the CPU, where nothing is registered.)
void fake_cann_before_import() {
  keys_of_cuda.swap(c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys());
}

void fake_cann_after_import() {
  c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys().merge(keys_of_cuda);
}

// Put the kernels in place. Returns how many of torch_npu's were replaced.
int fake_cann_install() {
  auto& dispatcher = c10::Dispatcher::singleton();
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  int replaced = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const std::string own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (kStorage.count(own) > 0) continue;
    const bool on_host = op->hasKernelForDispatchKey(DispatchKey::CPU);
    if (!op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
      if (on_host && !has_default(*op)) {
        library->impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
      }
      continue;
    }
    if (!on_host && !has_default(*op)) continue;  // torch_npu composes it of others, or asks CANN, which refuses
    if (own == "copy_") {
      library->impl("copy_", &copy);
    } else if (own == "_local_scalar_dense") {
      library->impl("_local_scalar_dense", &local_scalar);
    } else {
      library->impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
    replaced++;
  }
  return replaced;
}
}
