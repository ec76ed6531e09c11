// A device in host memory whose kernels run late: each stream is a thread that runs what was queued, in order.
//
// To torch it is an accelerator as any other: allocator, streams, events, pinned memory. The kernels are those of the
// CPU, on the same memory, so that the right order gives the CPU's numbers to the bit. What is queued holds no tensors:
// as on a GPU, a kernel that runs after its memory was freed finds whatever is there then. What was freed last is the
// first to be allocated again on the same stream, and filled with NaN when the stream comes to that.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr DeviceType SIMULATED = DeviceType::PrivateUse1;
constexpr size_t MOST_RESULTS = 20000;  // of meta kernels that are kept
const Device DEVICE(SIMULATED, 0);

std::atomic<int> most_delay_us{0};  // of one kernel
std::atomic<int64_t> host_waits{0};  // as often the host would wait for CUDA, which no graph may contain

// --- streams and events -----------------------------------------------------------------------------------------------

// Something that happens once, on a stream or when the host says so.
struct Happening {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;

  void happen() {
    {
      std::lock_guard<std::mutex> guard(mutex);
      is_over = true;
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_over; });
  }
  bool query() {
    std::lock_guard<std::mutex> guard(mutex);
    return is_over;
  }
};
using Shared = std::shared_ptr<Happening>;

class Queue {
 public:
  explicit Queue(StreamId id) : random_(static_cast<unsigned>(id) + 1) {
    std::thread([this] { run(); }).detach();
  }
  void push(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      waiting_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  Shared mark() {
    auto happening = std::make_shared<Happening>();
    push([happening] { happening->happen(); });
    return happening;
  }

 private:
  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !waiting_.empty(); });
        work = std::move(waiting_.front());
        waiting_.pop_front();
      }
      const int most = most_delay_us;
      if (most > 0 && random_() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
      }
      try {
        work();
      } catch (const std::exception& error) {
        fprintf(stderr, "a kernel of the simulated device has failed: %s\n", error.what());
        std::abort();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::minstd_rand random_;
};

thread_local StreamId current_stream = 0;

// Streams live for as long as the process.
class Streams {
 public:
  Queue& queue(StreamId id) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& found = queues_[id];
    if (!found) {
      found = new Queue(id);
    }
    return *found;
  }
  StreamId fresh() {
    std::lock_guard<std::mutex> guard(mutex_);
    return ++last_;
  }
  std::vector<Queue*> all() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<Queue*> found;
    for (auto& [id, queue] : queues_) {
      found.push_back(queue);
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::map<StreamId, Queue*> queues_;
  StreamId last_ = 0;
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

Queue& here() {
  return streams().queue(current_stream);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = SIMULATED;
  DeviceType type() const override { return SIMULATED; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, DEVICE, current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::UNSAFE, DEVICE, streams().fresh()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(DEVICE);
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Shared;
    }
    *static_cast<Shared*>(*event) = streams().queue(stream.id()).mark();
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      Shared happening = *static_cast<Shared*>(event);
      streams().queue(stream.id()).push([happening] { happening->wait(); });
    }
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Shared*>(event); }
  bool queryEvent(void* event) const override { return event == nullptr || (*static_cast<Shared*>(event))->query(); }
  void synchronizeEvent(void* event) const override {
    ++host_waits;
    if (event != nullptr) {
      (*static_cast<Shared*>(event))->wait();
    }
  }
  bool queryStream(const Stream& stream) const override { return streams().queue(stream.id()).mark()->query(); }
  void synchronizeStream(const Stream& stream) const override {
    ++host_waits;
    streams().queue(stream.id()).mark()->wait();
  }
  void synchronizeDevice(DeviceIndex) const override {
    ++host_waits;
    for (Queue* queue : streams().all()) {
      queue->mark()->wait();
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory -----------------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t size;
  StreamId stream;  // that it was allocated on, and is used again on
  std::vector<StreamId> users{};  // other streams, by record_stream
};

class Memory {
 public:
  Block* take(size_t nbytes, StreamId stream) {
    const size_t size = (nbytes + 511) / 512 * 512;
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK_WITH(
        OutOfMemoryError, allocated_ + size <= limit_, "the simulated device has no ", size, " bytes left of ", limit_);
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    auto& free = free_[{stream, size}];
    if (!free.empty()) {
      Block* block = free.back();
      free.pop_back();
      void* data = block->data;
      streams().queue(stream).push([data, size] { memset(data, 0xff, size); });
      return block;
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, size) == 0, "out of memory");
    memset(data, 0xff, size);  // NaN
    return new Block{data, size, stream};
  }
  // As torch's caching allocators: at once for its own stream, and for others when they have come to this point.
  void give_back(Block* block) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      allocated_ -= block->size;
    }
    auto users = std::move(block->users);
    block->users.clear();
    for (StreamId user : users) {
      auto passed = streams().queue(user).mark();
      streams().queue(block->stream).push([passed] { passed->wait(); });
    }
    std::lock_guard<std::mutex> guard(mutex_);
    free_[{block->stream, block->size}].push_back(block);
  }
  size_t allocated() { return allocated_; }
  size_t peak() { return peak_; }
  void reset_peak() { peak_ = allocated_; }
  void limit(size_t nbytes) { limit_ = nbytes; }

 private:
  std::mutex mutex_;
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> free_;
  size_t allocated_ = 0, peak_ = 0, limit_ = std::numeric_limits<size_t>::max();
};

Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

void free_block(void* block) {
  memory().give_back(static_cast<Block*>(block));
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const {
  auto* block = static_cast<Block*>(data.get_context());
  if (block != nullptr && stream.id() != block->stream) {
    block->users.push_back(stream.id());
  }
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, nullptr, &free_block_or_nothing, DEVICE};
    }
    Block* block = memory().take(nbytes, current_stream);
    return {block->data, block, &free_block_or_nothing, DEVICE};
  }
  static void free_block_or_nothing(void* block) {
    if (block != nullptr) {
      free_block(block);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    here().mark()->wait();
    memcpy(to, from, count);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(SIMULATED, &allocator);

// Host memory that streams copy from and to while the host goes on. It is used again when all streams have passed.
struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, Device(DeviceType::CPU)};
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, nbytes) == 0, "out of memory");
    memset(data, 0xff, nbytes);
    lock(reinterpret_cast<uintptr_t>(data), nbytes);
    return {data, data, &Pinned::free, Device(DeviceType::CPU)};
  }
  static void free(void* data);
  void lock(uintptr_t address, size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex);
    sizes[address] = nbytes;
  }
  void unlock(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex);
    sizes.erase(address);
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(mutex);
    const auto address = reinterpret_cast<uintptr_t>(data);
    auto after = sizes.upper_bound(address);
    if (after == sizes.begin()) {
      return false;
    }
    --after;
    return address < after->first + after->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::free; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;
};
Pinned pinned;
REGISTER_HOST_ALLOCATOR(DeviceType::PrivateUse1, &pinned);

void Pinned::free(void* data) {
  pinned.unlock(reinterpret_cast<uintptr_t>(data));
  auto queues = streams().all();
  auto left = std::make_shared<std::atomic<size_t>>(queues.size());
  if (queues.empty()) {
    std::free(data);
  }
  for (Queue* queue : queues) {
    queue->push([left, data] {
      if (left->fetch_sub(1) == 1) {
        std::free(data);
      }
    });
  }
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto generator = getNewGenerator(0);
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    struct Random : at::CPUGeneratorImpl {
      Random() { device_ = DEVICE; key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
    };
    return at::make_generator<Random>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr now = allocator.allocate(size);
    void *to = now.get(), *from = impl->mutable_data();
    const size_t kept = std::min(size, impl->nbytes());
    if (kept > 0) {
      here().push([to, from, kept] { memcpy(to, from, kept); });
    }
    impl->set_data_ptr_noswap(std::move(now));
    impl->set_nbytes(size);
  }
};

// --- kernels ----------------------------------------------------------------------------------------------------------

// The same memory as a tensor of the CPU, which owns nothing.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != SIMULATED) {
    return tensor;
  }
  auto storage = at::from_blob(
      tensor.storage().mutable_data(), {static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize())},
      at::TensorOptions().dtype(tensor.dtype()));
  auto view = at::native::as_strided_tensorimpl(storage, tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    view._set_conj(true);
  }
  if (tensor.is_neg()) {
    view._set_neg(true);
  }
  return view;
}

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == SIMULATED;
}

// Replace every tensor, and every device, on a stack.
template <class Change>
c10::IValue changed(const c10::IValue& value, Change change, Device device) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) {
      list.push_back(change(each));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      list.push_back(each && each->defined() ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == SIMULATED) {
    return device;
  }
  if (value.isGenerator()) {
    return c10::IValue();
  }
  return value;
}

using Values = std::vector<c10::IValue>;

template <class Change>
torch::jit::Stack changed_all(const Values& values, Change change, Device device) {
  torch::jit::Stack stack;
  for (const auto& value : values) {
    stack.push_back(changed(value, change, device));
  }
  return stack;
}

at::Tensor like_on(const at::Tensor& tensor, Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).pinned_memory(false));
}

// Host tensors are arguments by value (numbers): the host may change them when this has returned.
at::Tensor argument_on_host(const at::Tensor& tensor) {
  return is_ours(tensor) || !tensor.defined() ? on_host(tensor) : tensor.clone();
}

at::Tensor as_meta(const at::Tensor& tensor) {
  return is_ours(tensor) ? like_on(tensor, Device(DeviceType::Meta)) : tensor;
}

bool draws_numbers(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    const auto& type = *argument.type();
    if (type.kind() == c10::TypeKind::GeneratorType ||
        (type.kind() == c10::TypeKind::OptionalType &&
         type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType)) {
      return true;
    }
  }
  return schema.name() == "aten::native_dropout";
}

std::mutex random_numbers;

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    throw std::runtime_error(toString(op.operator_name()) + ": " + error.what_without_backtrace());
  }
}

// Writes what meta kernels see of an argument; returns whether the result follows from it, and not from values.
bool describe(const c10::IValue& value, std::string* key) {
  const auto write = [key](char kind, const void* data, size_t nbytes) {
    key->push_back(kind);
    key->append(static_cast<const char*>(data), nbytes);
  };
  const auto write_number = [&write](char kind, int64_t number) { write(kind, &number, sizeof(number)); };
  if (value.isNone()) {
    key->push_back('n');
  } else if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) {
      key->push_back('u');
      return true;
    }
    if (!is_ours(tensor)) {
      // A number. The count of elements that a mask selects is a value.
      write_number(tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 'h',
                   static_cast<int64_t>(tensor.scalar_type()));
      return tensor.dim() == 0 && tensor.scalar_type() != at::kBool && tensor.scalar_type() != at::kByte;
    }
    write_number('t', static_cast<int64_t>(tensor.scalar_type()));
    write_number('d', tensor.dim());
    write('s', tensor.sizes().data(), tensor.dim() * sizeof(int64_t));
    write('/', tensor.strides().data(), tensor.dim() * sizeof(int64_t));
  } else if (value.isInt()) {
    write_number('i', value.toInt());
  } else if (value.isBool()) {
    write_number('b', value.toBool());
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    write('f', &number, sizeof(number));
  } else if (value.isString()) {
    write_number('c', static_cast<int64_t>(value.toStringRef().size()));
    key->append(value.toStringRef());
  } else if (value.isDevice()) {
    write_number('v', static_cast<int64_t>(value.toDevice().type()));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    write_number('l', static_cast<int64_t>(list.size()));
    return std::all_of(list.begin(), list.end(), [key](const c10::IValue& each) { return describe(each, key); });
  } else {
    return false;
  }
  return true;
}

bool is_out(const c10::FunctionSchema& schema, size_t number, const c10::IValue& value) {
  return schema.arguments()[number].is_out() && value.isTensor();
}

// The results of an operator's meta kernel, or its `out`s if it has any; none if they depend on values. Most of these
// kernels are written in Python and take longer than all that the device does with a small tensor, so what they give
// is kept.
std::optional<torch::jit::Stack> results_on_meta(const c10::OperatorHandle& op, const Values& arguments) {
  static std::mutex guard;
  static auto& known = *new std::unordered_map<std::string, std::optional<torch::jit::Stack>>();
  std::string key = toString(op.operator_name());
  key.push_back(static_cast<char>(at::get_default_dtype_as_scalartype()));
  const bool is_kept = std::all_of(
      arguments.begin(), arguments.end(), [&key](const c10::IValue& each) { return describe(each, &key); });
  if (is_kept) {
    std::lock_guard<std::mutex> locked(guard);
    if (const auto found = known.find(key); found != known.end()) {
      return found->second;
    }
  }
  std::optional<torch::jit::Stack> metas = changed_all(arguments, as_meta, Device(DeviceType::Meta));
  torch::jit::Stack outs;
  for (size_t number = 0; number < metas->size(); ++number) {
    if (is_out(op.schema(), number, (*metas)[number])) {
      outs.push_back((*metas)[number]);
    }
  }
  try {
    op.callBoxed(&*metas);
    if (!outs.empty()) {
      metas = std::move(outs);
    }
  } catch (const std::exception&) {
    if (!outs.empty()) {
      throw;
    }
    metas.reset();
  }
  if (is_kept) {
    std::lock_guard<std::mutex> locked(guard);
    if (known.size() >= MOST_RESULTS) {
      known.clear();
    }
    known.insert_or_assign(std::move(key), metas);
  }
  return metas;
}

// Any operator: the CPU's kernel, later.
void queue_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Values arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  at::AutoDispatchBelowADInplaceOrView below_autograd;

  const auto run_now = [&](bool has_outputs) {
    here().mark()->wait();
    auto values = changed_all(arguments, on_host, Device(DeviceType::CPU));
    {
      std::lock_guard<std::mutex> guard(random_numbers);
      op.callBoxed(&values);
    }
    if (has_outputs) {
      const auto to_device = [](const at::Tensor& tensor) {
        if (!tensor.defined() || is_ours(tensor)) {
          return tensor;
        }
        auto made = like_on(tensor, DEVICE);
        auto to = on_host(made);
        here().push([to, tensor] { at::Tensor(to).copy_(tensor); });
        return made;
      };
      for (auto& value : values) {
        value = changed(value, to_device, DEVICE);
      }
      *stack = std::move(values);
    }
  };

  if (schema.is_mutable()) {
    // An `out` of another size is resized by the kernel, too late.
    std::vector<at::Tensor> outs;
    for (size_t number = 0; number < count; ++number) {
      if (is_out(schema, number, arguments[number])) {
        outs.push_back(arguments[number].toTensor());
      }
    }
    if (!outs.empty()) {
      const auto metas = *results_on_meta(op, arguments);
      for (size_t number = 0; number < outs.size(); ++number) {
        const auto sizes = metas[number].toTensor().sizes();
        if (outs[number].sizes() != sizes) {
          outs[number].resize_(sizes);
        }
      }
    }
    if (draws_numbers(schema)) {
      run_now(false);
    } else {
      auto values = std::make_shared<torch::jit::Stack>(
          changed_all(arguments, argument_on_host, Device(DeviceType::CPU)));
      here().push([op, values] { run_kernel(op, values.get()); });
    }
    size_t written = 0;
    for (const auto& returned : schema.returns()) {
      for (; written < count; ++written) {
        const auto* alias = schema.arguments()[written].alias_info();
        if (alias != nullptr && alias->isWrite()) {
          break;
        }
      }
      TORCH_CHECK(
          returned.alias_info() != nullptr && written < count, "the simulated device has no ", schema.operator_name());
      stack->push_back(arguments[written++]);
    }
    return;
  }
  for (const auto& returned : schema.returns()) {
    TORCH_CHECK(returned.alias_info() == nullptr, "the simulated device has no ", schema.operator_name());
  }
  // The CPU's has statistics of another dtype than that of other devices, which is what is known beforehand.
  const bool differs = schema.name() == "aten::native_layer_norm" || schema.name() == "aten::native_group_norm";
  const bool is_sought = !differs && !draws_numbers(schema);
  const auto metas = is_sought ? results_on_meta(op, arguments) : std::nullopt;
  const auto is_value = [](const c10::IValue& value) { return !value.isTensor() && !value.isTensorList(); };
  if (!metas || std::any_of(metas->begin(), metas->end(), is_value)) {
    run_now(true);
    return;
  }
  auto made = std::make_shared<Values>();
  for (const auto& meta : *metas) {
    const auto make = [](const at::Tensor& tensor) { return tensor.defined() ? like_on(tensor, DEVICE) : tensor; };
    stack->push_back(changed(meta, make, DEVICE));
    made->push_back(changed(stack->back(), on_host, Device(DeviceType::CPU)));
  }
  auto values =
      std::make_shared<torch::jit::Stack>(changed_all(arguments, argument_on_host, Device(DeviceType::CPU)));
  here().push([op, values, made] {
    run_kernel(op, values.get());
    for (size_t number = 0; number < made->size(); ++number) {
      if ((*made)[number].isTensor()) {
        if ((*made)[number].toTensor().defined()) {
          (*made)[number].toTensor().copy_((*values)[number].toTensor());
        }
        continue;
      }
      auto to = (*made)[number].toTensorList(), from = (*values)[number].toTensorList();
      for (size_t each = 0; each < to.size(); ++each) {
        at::Tensor(to[each]).copy_(from[each]);
      }
    }
  });
}

at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool> pinned_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned_memory.value_or(false), "Only dense CPU tensors can be pinned");  // as CUDA says
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pinned_memory) {
  TORCH_CHECK(!pinned_memory.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) {
    start = offset->expect_int();
  }
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

void make_room(const at::Tensor& self) {
  const auto nbytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
  }
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  make_room(self);
  return self;
}

at::Tensor& set(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  make_room(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set(self, std::move(source), 0, {c10::SymInt(numel)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

// `non_blocking` counts where the host's memory is pinned. Otherwise the host waits, and what it gave is taken at once.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  at::Tensor from = on_host(self), to = on_host(dst);
  if (is_ours(self) && is_ours(dst)) {
    here().push([from, to]() { at::Tensor(to).copy_(from); });
  } else if (is_ours(dst)) {
    if (!(non_blocking && self.is_pinned())) {
      ++host_waits;
      from = self.clone();
      here().push([from, to] { at::Tensor(to).copy_(from); });
    } else {
      at::Tensor alias = at::native::as_strided_tensorimpl(
          at::from_blob(self.storage().mutable_data(),
                        {static_cast<int64_t>(self.storage().nbytes() / self.itemsize())}, self.options()),
          self.sizes(), self.strides(), self.storage_offset());
      here().push([alias, to] { at::Tensor(to).copy_(alias); });
    }
  } else {
    at::Tensor alias = at::native::as_strided_tensorimpl(
        at::from_blob(dst.storage().mutable_data(),
                      {static_cast<int64_t>(dst.storage().nbytes() / dst.itemsize())},
                      dst.options().pinned_memory(false)),
        dst.sizes(), dst.strides(), dst.storage_offset());
    here().push([from, alias] { at::Tensor(alias).copy_(from); });
    if (!(non_blocking && dst.is_pinned())) {
      ++host_waits;
      here().mark()->wait();
    }
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) {
    dst.resize_(self.sizes());
  }
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  ++host_waits;
  here().mark()->wait();
  return at::_local_scalar_dense(on_host(self));
}

void record_stream(at::Tensor& self, Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // These would be put together from others, and not fit their backward, which is the CPU's.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
  library.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&queue_kernel>());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
    return as_strided(self, sizes, strides, self.sym_storage_offset());
  });
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize);
  library.impl("set_", [](at::Tensor& self) -> at::Tensor& {
    return set(self, at::Storage(at::Storage::use_byte_size_t(), 0, &allocator, true), 0, {c10::SymInt(0)},
               {c10::SymInt(1)});
  });
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
}

// --- collectives ------------------------------------------------------------------------------------------------------

// With NCCL's rules, over gloo: a collective begins when the current stream has come to it, runs on a stream of its own,
// and what is queued after `wait` runs after it. It keeps no tensors alive.
class Done final : public c10d::Work {
 public:
  Done(c10d::OpType kind, Shared happening, std::vector<at::Tensor> outputs)
      : Work(-1, kind), happening_(std::move(happening)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return !happening_ || happening_->query(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    if (Shared happening = happening_) {
      here().push([happening] { happening->wait(); });
    }
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  Shared happening_;
  std::vector<at::Tensor> outputs_;
};

std::vector<at::Tensor> all_on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> found;
  for (const auto& tensor : tensors) {
    found.push_back(on_host(tensor));
  }
  return found;
}

std::vector<std::vector<at::Tensor>> all_on_host(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<std::vector<at::Tensor>> found;
  for (const auto& list : lists) {
    found.push_back(all_on_host(list));
  }
  return found;
}

class Collectives final : public c10d::Backend {
 public:
  using Started = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;

  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(streams().fresh()) {}
  const std::string getBackendName() const override { return "simulated"; }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = all_on_host(tensors);
    return start(c10d::OpType::BROADCAST, [=, this]() mutable { return gloo_->broadcast(host, options); });
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = all_on_host(tensors);
    auto given = options;
    const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
    if (averages) {
      given.reduceOp = c10d::ReduceOp::SUM;
    }
    return start(c10d::OpType::ALLREDUCE, [=, this]() mutable {
      Tensors sums;
      for (const auto& tensor : host) {
        const bool is_short = at::isReducedFloatingType(tensor.scalar_type());
        sums.push_back(is_short ? tensor.to(at::kFloat) : tensor.contiguous());
      }
      auto work = gloo_->allreduce(sums, given);
      work->wait();
      for (size_t number = 0; number < host.size(); ++number) {
        host[number].copy_(averages ? sums[number] / getSize() : sums[number]);
      }
      return work;
    });
  }
  Started allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = all_on_host(outputs);
    auto from = all_on_host(inputs);
    return start(c10d::OpType::ALLGATHER, [=, this]() mutable { return gloo_->allgather(to, from, options); });
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return start(
        c10d::OpType::_ALLGATHER_BASE, [=, this]() mutable { return gloo_->_allgather_base(to, from, options); });
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    auto reduce = c10d::AllreduceOptions();
    const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
    reduce.reduceOp = averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, [=, this]() mutable {
      Tensors sums{from.to(at::promote_types(from.scalar_type(), at::kFloat), false, true)};
      auto work = gloo_->allreduce(sums, reduce);
      work->wait();
      to.copy_(sums[0].view({getSize(), -1})[getRank()].view_as(to));
      if (averages) {
        to.div_(getSize());
      }
      return work;
    });
  }
  Started scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto to = all_on_host(outputs);
    auto from = all_on_host(inputs);
    return start(c10d::OpType::SCATTER, [=, this]() mutable { return gloo_->scatter(to, from, options); });
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = all_on_host(outputs), from = all_on_host(inputs);
    return start(c10d::OpType::COALESCED, [=, this]() mutable {
      Started work;
      for (size_t number = 0; number < to.size(); ++number) {
        work = gloo_->_allgather_base(to[number], from[number], options);
        work->wait();
      }
      return work;
    });
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Started work;
    for (size_t number = 0; number < outputs.size(); ++number) {
      work = _reduce_scatter_base(outputs[number], inputs[number], options);
    }
    return work;  // of the last one, which all others run before
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Started work;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      c10d::AllreduceOptions each;
      each.reduceOp = options.reduceOp;
      work = allreduce(one, each);
    }
    return work;
  }
  Started alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return start(c10d::OpType::ALLTOALL_BASE, [=, this]() mutable {
      return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
    });
  }
  Started send(Tensors& tensors, int peer, int tag) override {
    auto host = all_on_host(tensors);
    return start_or_collect(c10d::OpType::SEND, [=, this]() mutable { return gloo_->send(host, peer, tag); });
  }
  Started recv(Tensors& tensors, int peer, int tag) override {
    auto host = all_on_host(tensors);
    return start_or_collect(c10d::OpType::RECV, [=, this]() mutable { return gloo_->recv(host, peer, tag); });
  }
  // Messages between these two go at once, in whatever order they are awaited on the other rank.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_collecting_ = true; }
  Started endCoalescing() override {
    is_collecting_ = false;
    auto messages = std::move(collected_);
    collected_.clear();
    return start(c10d::OpType::COALESCED, [messages]() -> Started {
      std::vector<Started> begun;
      for (const auto& message : messages) {
        begun.push_back(message());
      }
      for (const auto& work : begun) {
        work->wait();
      }
      return c10::make_intrusive<Done>(c10d::OpType::COALESCED, nullptr, Tensors());
    });
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    auto work = start(c10d::OpType::BARRIER, [=, this] { return gloo_->barrier(options); });
    streams().queue(stream_).mark()->wait();
    return work;
  }

 private:
  Started start_or_collect(c10d::OpType kind, std::function<Started()> message) {
    if (!is_collecting_) {
      return start(kind, message);
    }
    collected_.push_back(std::move(message));
    return nullptr;
  }
  template <class Collective>
  Started start(c10d::OpType kind, Collective collective) {
    auto ready = here().mark();
    auto& queue = streams().queue(stream_);
    queue.push([ready, collective]() mutable {
      ready->wait();
      // What its caller frees too early, others have written by now.
      std::this_thread::sleep_for(std::chrono::microseconds(most_delay_us * 2));
      collective()->wait();
    });
    return c10::make_intrusive<Done>(kind, queue.mark(), Tensors());
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  StreamId stream_;
  bool is_collecting_ = false;
  std::vector<std::function<Started()>> collected_;
};

struct Registration {
  Registration() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registration;

}  // namespace

PYBIND11_MODULE(simulated_device, module) {
  module.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(gloo);
  });
  module.def("host_waits", [] { return host_waits.load(); });
  module.def("set_delay", [](int most_us) { most_delay_us = most_us; });
  module.def("sleep", [](int64_t us) {
    here().push([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
  module.def("allocated", [] { return memory().allocated(); });
  module.def("peak", [] { return memory().peak(); });
  module.def("limit", [](size_t nbytes) { memory().limit(nbytes); });
  module.def("pin", [](uintptr_t address, size_t nbytes) {
    at::globalContext().lazyInitDevice(SIMULATED);  // or torch takes no memory for pinned
    pinned.lock(address, nbytes);
  });
  module.def("unpin", [](uintptr_t address) { pinned.unlock(address); });
  module.def("reset_peak", [] { memory().reset_peak(); });
}
