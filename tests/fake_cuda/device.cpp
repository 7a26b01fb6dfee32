// A CUDA device made of host memory, for a CPU build of torch. See README.md in this folder.
//
// A CPU build leaves CUDA's dispatch key, allocator, device guard and hooks free, and this file takes them. Memory of
// the device is a CPU storage under another name, its twin. An operator on CUDA tensors checks what a GPU checks, runs
// torch's CPU kernel on the twins, and gives the results back as CUDA tensors.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;

std::atomic<DeviceIndex> num_devices{1};
thread_local DeviceIndex active_device = 0;

// ---- counts ---------------------------------------------------------------------------------------------------------
std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> num_kernels{0};

void count_memory(int64_t bytes) {
  const int64_t now = live_bytes += bytes;
  int64_t peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

// Python's function (kind, operator, bytes), called where the host waits for the device or bytes pass between them.
// It is never deleted: the interpreter is gone before static objects are.
py::object* observer = nullptr;

void observe(const char* kind, const std::string& op, int64_t bytes) {
  if (observer == nullptr) {
    return;
  }
  py::gil_scoped_acquire gil;
  (*observer)(kind, op, bytes);
}

// ---- memory of the device -------------------------------------------------------------------------------------------
struct Twin {
  Storage cpu;
  int64_t bytes;
};

void drop_twin(void* context) {
  auto* twin = static_cast<Twin*>(context);
  count_memory(-twin->bytes);
  delete twin;
}

c10::DataPtr device_memory(Storage cpu, DeviceIndex index) {
  auto* twin = new Twin{std::move(cpu), 0};
  twin->bytes = static_cast<int64_t>(twin->cpu.nbytes());
  count_memory(twin->bytes);
  return {twin->cpu.mutable_data(), twin, &drop_twin, Device(DeviceType::CUDA, index)};
}

Storage cpu_storage(size_t bytes) {
  auto* allocator = c10::GetAllocator(DeviceType::CPU);
  return Storage(Storage::use_byte_size_t{}, bytes, allocator->allocate(bytes), allocator, /*resizable=*/true);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return device_memory(cpu_storage(bytes), active_device);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // the context is no address
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} device_allocator;

Storage cuda_storage(const Storage& cpu, DeviceIndex index) {
  return Storage(Storage::use_byte_size_t{}, cpu.nbytes(), device_memory(cpu, index), &device_allocator, true);
}

const Storage& twin_of(const Storage& cuda) {
  auto& memory = cuda.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (memory.get_deleter() != &drop_twin) {  // FSDP's storages begin as, and shrink to, no memory at all
    TORCH_CHECK(cuda.nbytes() == 0, "fake CUDA: memory that it did not make");
    cuda.set_data_ptr_noswap(device_memory(cpu_storage(0), cuda.device().index()));
  }
  return static_cast<Twin*>(cuda.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context())->cpu;
}

// After a CPU kernel has given the twin other memory, as `out=` and `resize_` do.
void follow_twin(const Storage& cuda, const Storage& cpu) {
  if (cuda.data() != cpu.data() || cuda.nbytes() != cpu.nbytes()) {
    auto memory = device_memory(cpu, cuda.device().index());
    cuda.set_data_ptr_noswap(std::move(memory));
    cuda.set_nbytes(cpu.nbytes());
  }
}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  const Storage cuda = tensor.storage();
  const Storage old = twin_of(cuda);
  const Storage cpu = cpu_storage(bytes);
  const size_t kept = std::min<size_t>(bytes, old.nbytes());
  if (kept) {
    std::memcpy(cpu.mutable_data(), old.data(), kept);
  }
  cuda.set_data_ptr_noswap(device_memory(cpu, cuda.device().index()));
  cuda.set_nbytes(bytes);
}

// ---- pinned memory of the host --------------------------------------------------------------------------------------
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;  // by address

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, bytes ? bytes : 1) == 0, "out of memory");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const char*>(data)] = bytes ? bytes : 1;
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks.erase(static_cast<const char*>(data));
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto block = pinned_blocks.upper_bound(static_cast<const char*>(data));
  if (block == pinned_blocks.begin()) {
    return false;
  }
  --block;
  return static_cast<const char*>(data) < block->first + block->second;
}

// ---- what torch asks a device: hooks and guard ----------------------------------------------------------------------
DeviceIndex exchange_device(DeviceIndex index) {
  const DeviceIndex old = active_device;
  if (index >= 0) {
    active_device = index;
  }
  return old;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, active_device); }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return active_device; }
  DeviceIndex current_device() const override { return active_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchange_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
};

// One stream, on which everything has happened already.
struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, active_device); }
  Device exchangeDevice(Device device) const override {
    return Device(DeviceType::CUDA, exchange_device(device.index()));
  }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange_device(device.index()); }
  c10::Stream getStream(Device device) const override {
    const DeviceIndex index = device.index() < 0 ? active_device : device.index();
    return c10::Stream(c10::Stream::DEFAULT, Device(DeviceType::CUDA, index));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<FakeGuard*>(this);  // any address: an event that has passed
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// ---- an operator ----------------------------------------------------------------------------------------------------
// Operators that take tensors of both devices on a GPU, too; `index` and its kin: only where the indices are the CPU's.
const std::unordered_set<std::string> COPIES = {"aten::copy_", "aten::_foreach_copy_"};
const std::unordered_set<std::string> INDEXING = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
// Operators whose result the host must see, or whose shape it must know: it waits for the device.
const std::unordered_set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave", "aten::bincount"};

Tensor on_storage(const Storage& storage, const Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    impl->_set_conj(true);
  }
  if (like.is_neg()) {
    impl->_set_neg(true);
  }
  return tensor;
}

// The arguments of one call, as the CPU's.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  IValue lower(const IValue& value) {
    if (value.isTensor()) {
      return lower(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(lower(tensor));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<Tensor>(lower(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      makes_cuda_ = true;
      set_index(value.toDevice().has_index() ? value.toDevice().index() : active_device);
      return Device(DeviceType::CPU);
    }
    if (value.isGenerator()) {
      has_cpu_generator_ |= value.toGenerator().device().is_cpu();
    }
    if (value.isStorage() && value.toStorage().device().is_cuda()) {
      return lower(value.toStorage());
    }
    return value;
  }

  void check() const {
    const bool touches_cuda = !lowered_.empty() || makes_cuda_;
    TORCH_CHECK(
        !(has_cpu_generator_ && touches_cuda),
        "Expected a 'cuda' device type for generator but found 'cpu' (", name_, ")");
    if (lowered_.empty() || cpu_shape_.empty() || COPIES.count(name_)) {
      return;
    }
    const bool is_index_into_cuda = INDEXING.count(name_) && first_is_cuda_;
    TORCH_CHECK(
        is_index_into_cuda,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(index_),
        " and cpu! (", name_, ", a CPU tensor of ", cpu_shape_, ")");
  }

  // Tell of what makes the host wait, before the kernel runs. arguments: already lowered.
  void tell(const IValue* arguments) const {
    if (lowered_.empty()) {
      return;
    }
    if (READS.count(name_)) {
      observe("read", name_, 0);
    } else if (name_ == "aten::_index_put_impl_" && (has_mask_ || !cpu_shape_.empty())) {
      // a mask's size must be known, and indices of the CPU are copied; `index` asks for both by operators of its own
      observe(has_mask_ ? "read" : "index", name_, 0);
    } else if (name_ == "aten::copy_" && lowered_.size() == 1) {
      const Tensor& to = arguments[0].toTensor();
      const Tensor& from = arguments[1].toTensor();
      const bool goes_up = lowered_[0].second.is_same(to);
      const void* host = goes_up ? from.const_data_ptr() : to.const_data_ptr();
      const bool is_free = is_pinned(host) && arguments[2].toBool();
      const char* kind = goes_up ? (is_free ? "up" : "up, waits") : (is_free ? "down" : "down, waits");
      observe(kind, name_, static_cast<int64_t>(to.nbytes()));
    }
  }

  // CUDA arguments that the kernel resized, or gave another storage, follow.
  void update() {
    for (auto& [cuda, cpu] : lowered_) {
      const Storage cpu_storage = cpu.storage();
      const auto known = cuda_by_cpu_.find(cpu_storage.unsafeGetStorageImpl());
      if (known == cuda_by_cpu_.end()) {  // `set_` of a storage that the kernel made
        cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(raise(cpu_storage));
      } else {
        follow_twin(known->second, cpu_storage);
        if (!cuda.storage().is_alias_of(known->second)) {
          cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(known->second);
        }
      }
      const bool same = cuda.sizes() == cpu.sizes() && cuda.strides() == cpu.strides();
      if (!same || cuda.storage_offset() != cpu.storage_offset()) {
        cuda.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

  IValue raise(const IValue& value) {
    if (value.isTensor()) {
      return raise(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(raise(tensor));
      }
      return list;
    }
    return value;
  }

  bool has_new_memory = false;  // whether a result is neither an argument nor a view of one

 private:
  Tensor lower(const Tensor& tensor) {
    const bool is_first = !has_seen_tensor_;
    has_seen_tensor_ = true;
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.is_cuda()) {
      first_is_cuda_ |= is_first;
      has_mask_ |= !is_first && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
      set_index(tensor.device().index());
      lower(tensor.storage());
      lowered_.emplace_back(tensor, on_storage(twin_of(tensor.storage()), tensor, c10::DispatchKey::CPU));
      return lowered_.back().second;
    }
    if (tensor.is_cpu() && tensor.dim() > 0) {  // a number may be the CPU's: a kernel takes it as an argument
      cpu_shape_ = c10::str(tensor.sizes());
    }
    return tensor;
  }

  Storage lower(const Storage& cuda) {
    const Storage& cpu = twin_of(cuda);
    cuda_by_cpu_.emplace(cpu.unsafeGetStorageImpl(), cuda);
    return cpu;
  }

  Storage raise(const Storage& cpu) {
    const auto known = cuda_by_cpu_.find(cpu.unsafeGetStorageImpl());
    if (known != cuda_by_cpu_.end()) {
      return known->second;
    }
    has_new_memory = true;
    return cuda_by_cpu_.emplace(cpu.unsafeGetStorageImpl(), cuda_storage(cpu, index_)).first->second;
  }

  Tensor raise(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || (lowered_.empty() && !makes_cuda_)) {
      return tensor;
    }
    for (const auto& [cuda, cpu] : lowered_) {
      if (cpu.is_same(tensor)) {
        return cuda;
      }
    }
    return on_storage(raise(tensor.storage()), tensor, c10::DispatchKey::CUDA);
  }

  void set_index(DeviceIndex index) {
    TORCH_CHECK(
        index_ < 0 || index_ == index || COPIES.count(name_),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(index_),
        " and cuda:", int(index), "! (", name_, ")");
    if (index_ < 0) {
      index_ = index;
    }
  }

  const std::string& name_;
  std::vector<std::pair<Tensor, Tensor>> lowered_;  // a CUDA argument, and the tensor on its twin
  std::unordered_map<StorageImpl*, Storage> cuda_by_cpu_;
  DeviceIndex index_ = -1;  // the device of the arguments, which is the results'
  std::string cpu_shape_;  // of an argument that is the CPU's
  bool has_seen_tensor_ = false;
  bool first_is_cuda_ = false;
  bool has_mask_ = false;
  bool makes_cuda_ = false;
  bool has_cpu_generator_ = false;
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  const size_t begin = stack->size() - schema.arguments().size();
  Call call(name);
  for (size_t i = begin; i < stack->size(); ++i) {
    (*stack)[i] = call.lower((*stack)[i]);
  }
  call.check();
  call.tell(stack->data() + begin);
  {
    // as autograd and Python's modes have seen the call already, the kernel's own calls pass them by
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.update();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = call.raise((*stack)[i]);
  }
  // what only looks at memory, or takes some, launches nothing
  const bool only_takes = name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
  const bool only_looks = !schema.is_mutable() && !call.has_new_memory;
  if (!only_takes && !only_looks && name != "aten::set_" && name != "aten::resize_") {
    ++num_kernels;
  }
}

// Attention by its plain formula: there is no flash kernel for "cuda" here.
int64_t choose_math(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// ---- NCCL -----------------------------------------------------------------------------------------------------------
// Gloo's collectives on the twins. NCCL's conditions are checked: tensors on a GPU, and contiguous.
class FakeNCCL final : public c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;

 public:
  explicit FakeNCCL(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds) override {}

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto cpu = lower(tensors);
    return finished(gloo_->broadcast(cpu, options), tensors);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto cpu = lower(tensors);
    auto summing = options;
    const bool is_mean = take_mean(summing);
    auto work = finished(gloo_->allreduce(cpu, summing), tensors);
    divide(cpu, is_mean);
    return work;
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (Tensor& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return finished(nullptr, tensors);
  }
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto cpu_out = lower(out);
    auto cpu_in = lower(in);
    return finished(gloo_->allgather(cpu_out, cpu_in, options), out[0]);
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto cpu_out = lower(out);
    auto cpu_in = lower(in);
    return finished(gloo_->_allgather_base(cpu_out, cpu_in, options), {out});
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < out.size(); ++i) {
      _allgather_base(out[i], in[i], options);
    }
    return finished(nullptr, out);
  }
  Work reduce_scatter(
      Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto cpu_out = lower(out);
    auto cpu_in = lower(in);
    auto summing = options;
    const bool is_mean = take_mean(summing);
    auto work = finished(gloo_->reduce_scatter(cpu_out, cpu_in, summing), out);
    divide(cpu_out, is_mean);
    return work;
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto cpu_out = lower(out);
    auto cpu_in = lower(in);
    auto summing = options;
    const bool is_mean = take_mean(summing);
    auto work = finished(gloo_->_reduce_scatter_base(cpu_out, cpu_in, summing), {out});
    Tensors results{cpu_out};
    divide(results, is_mean);
    return work;
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < out.size(); ++i) {
      _reduce_scatter_base(out[i], in[i], options);
    }
    return finished(nullptr, out);
  }
  Work gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto cpu_out = lower(out);
    auto cpu_in = lower(in);
    return finished(gloo_->gather(cpu_out, cpu_in, options), in);
  }
  Work scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto cpu_out = lower(out);
    auto cpu_in = lower(in);
    return finished(gloo_->scatter(cpu_out, cpu_in, options), out);
  }
  Work barrier(const c10d::BarrierOptions& options) override {
    auto without_devices = options;
    without_devices.device_ids.clear();
    return finished(gloo_->barrier(without_devices), {});
  }

 private:
  struct Finished final : c10d::Work {
    explicit Finished(Tensors results) : results_(std::move(results)) { finish(); }
    bool wait(std::chrono::milliseconds) override { return true; }
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    Tensors result() override { return results_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(IValue(results_));
      return future;
    }
    Tensors results_;
  };

  static Work finished(const Work& work, Tensors results) {
    if (work) {
      work->wait();
      ++num_kernels;
    }
    return c10::make_intrusive<Finished>(std::move(results));
  }
  static Tensor lower(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device(), " (nccl)");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (nccl)");
    return on_storage(twin_of(tensor.storage()), tensor, c10::DispatchKey::CPU);
  }
  static Tensors lower(const Tensors& tensors) {
    Tensors cpu;
    for (const Tensor& tensor : tensors) {
      cpu.push_back(lower(tensor));
    }
    return cpu;
  }
  static std::vector<Tensors> lower(const std::vector<Tensors>& lists) {
    std::vector<Tensors> cpu;
    for (const Tensors& tensors : lists) {
      cpu.push_back(lower(tensors));
    }
    return cpu;
  }
  template <class Options>
  static bool take_mean(Options& options) {  // gloo has sums only
    if (options.reduceOp != c10d::ReduceOp::AVG) {
      return false;
    }
    options.reduceOp = c10d::ReduceOp::SUM;
    return true;
  }
  void divide(Tensors& tensors, bool is_mean) const {
    for (Tensor& tensor : tensors) {
      if (is_mean) {
        tensor.div_(size_);
      }
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

// ---- taking CUDA's places -------------------------------------------------------------------------------------------
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)  // by this very name
}  // namespace at
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_math)
}
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // operators that torch composes on other devices, out of what only its CUDA build has or in many kernels in place of
  // one: they are one kernel here, too
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_one_kernel = name.name == "aten::copy_" || name.name == "aten::resize_" || name.name == "aten::set_" ||
        name.name == "aten::native_layer_norm" || name.name == "aten::native_group_norm" ||
        name.name.rfind("aten::_foreach_", 0) == 0;
    const bool is_free = !c10::Dispatcher::singleton().findSchema(name)->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (is_one_kernel && is_free && name.name != "aten::_foreach_copy_") {
      const std::string overload = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
  }
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  m.def("live_bytes", [] { return live_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = live_bytes.load(); });
  m.def("num_kernels", [] { return num_kernels.load(); });
  m.def("set_num_devices", [](int count) { num_devices = static_cast<DeviceIndex>(count); });
  m.def("current_device", [] { return static_cast<int>(active_device); });
  m.def("exchange_device", [](int index) { return static_cast<int>(exchange_device(index)); });
  m.def("observe", [](py::object function) { observer = new py::object(std::move(function)); });
  m.def("resize_storage", &resize_storage);
  m.def("nccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<FakeNCCL>(std::move(gloo));
  });
}
