// libhccl.so of the simulated Ascend: the collectives of HCCL between processes of this machine, over sockets that leave
// nothing behind. A peer that is gone is an error at once, and one that says nothing is an error after a while.
//
// Every pair of ranks has a connection. What is sent is queued and written by a thread of its own, so that two ranks
// that send to each other before they receive do not block, as they would not on a device.
#include <third_party/hccl/inc/hccl/hccl.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using Bytes = std::vector<char>;
using Clock = std::chrono::steady_clock;

int timeout_s() {
  const char* text = std::getenv("FAKE_CANN_HCCL_TIMEOUT");
  return text == nullptr ? 120 : std::atoi(text);
}

// One connection to a peer: a queue of messages out, and blocking reads.
class Peer {
 public:
  explicit Peer(int socket) : socket_(socket), writer_([this] { write_all(); }) {}

  ~Peer() {
    {
      const std::lock_guard<std::mutex> lock(guard_);
      closing_ = true;
    }
    changed_.notify_one();
    writer_.join();
    close(socket_);
  }

  void send(const void* data, uint64_t size) {
    Bytes message(sizeof size + size);
    std::memcpy(message.data(), &size, sizeof size);
    if (size > 0) std::memcpy(message.data() + sizeof size, data, size);
    const std::lock_guard<std::mutex> lock(guard_);
    queue_.push_back(std::move(message));
    changed_.notify_one();
  }

  HcclResult receive(void* data, uint64_t size) {
    uint64_t sent = 0;
    if (const HcclResult error = read_all(&sent, sizeof sent)) return error;
    if (sent != size) {
      std::fprintf(stderr, "fake HCCL: %lu bytes were sent where %lu are awaited\n", sent, size);
      return HCCL_E_PARA;
    }
    return read_all(data, size);
  }

 private:
  HcclResult read_all(void* data, size_t size) {
    const auto limit = Clock::now() + std::chrono::seconds(timeout_s());
    char* at = static_cast<char*>(data);
    while (size > 0) {
      pollfd wanted{socket_, POLLIN, 0};
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
      if (left <= 0 || poll(&wanted, 1, static_cast<int>(left)) == 0) {
        std::fprintf(stderr, "fake HCCL: a peer sent nothing for %d s\n", timeout_s());
        return HCCL_E_TIMEOUT;
      }
      const ssize_t got = read(socket_, at, size);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        std::fprintf(stderr, "fake HCCL: a peer has left\n");
        return HCCL_E_REMOTE;
      }
      at += got;
      size -= static_cast<size_t>(got);
    }
    return HCCL_SUCCESS;
  }

  void write_all() {
    std::unique_lock<std::mutex> lock(guard_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const Bytes message = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      for (size_t at = 0; at < message.size();) {
        const ssize_t put = ::send(socket_, message.data() + at, message.size() - at, MSG_NOSIGNAL);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return;  // the peer has left; the next read says so
        at += static_cast<size_t>(put);
      }
      lock.lock();
    }
  }

  int socket_;
  std::mutex guard_;
  std::condition_variable changed_;
  std::deque<Bytes> queue_;
  bool closing_ = false;
  std::thread writer_;
};

sockaddr_un address_of(const std::string& id, uint32_t rank, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A name that begins with a zero byte is in no file system.
  const std::string name = id + "." + std::to_string(rank);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

struct Communicator {
  std::string id;
  uint32_t size = 0;
  uint32_t rank = 0;
  std::vector<std::unique_ptr<Peer>> peers;  // none at this rank's own place

  HcclResult connect_all() {
    peers.resize(size);
    socklen_t length = 0;
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un own = address_of(id, rank, &length);
    if (bind(listener, reinterpret_cast<const sockaddr*>(&own), length) != 0 ||
        listen(listener, static_cast<int>(size)) != 0) {
      std::perror("fake HCCL: listen");
      return HCCL_E_SYSCALL;
    }
    const auto limit = Clock::now() + std::chrono::seconds(timeout_s());
    for (uint32_t other = 0; other < rank; other++) {
      const sockaddr_un address = address_of(id, other, &length);
      const int joined = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      while (connect(joined, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        if (Clock::now() > limit) return missing(other);
        usleep(1000);
      }
      if (write(joined, &rank, sizeof rank) != sizeof rank) return HCCL_E_SYSCALL;
      peers[other] = std::make_unique<Peer>(joined);
    }
    for (uint32_t count = rank + 1; count < size; count++) {
      pollfd wanted{listener, POLLIN, 0};
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
      if (left <= 0 || poll(&wanted, 1, static_cast<int>(left)) <= 0) return missing(count);
      const int joined = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      uint32_t other = 0;
      if (joined < 0 || read(joined, &other, sizeof other) != sizeof other || other >= size) return HCCL_E_SYSCALL;
      peers[other] = std::make_unique<Peer>(joined);
    }
    close(listener);
    return HCCL_SUCCESS;
  }

  HcclResult missing(uint32_t other) const {
    std::fprintf(stderr, "fake HCCL: rank %u of %u waited for rank %u in vain\n", rank, size, other);
    return HCCL_E_TIMEOUT;
  }

  void send(uint32_t to, const void* data, uint64_t bytes) { peers[to]->send(data, bytes); }
  HcclResult receive(uint32_t from, void* data, uint64_t bytes) { return peers[from]->receive(data, bytes); }
};

uint64_t width(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: case HCCL_DATA_TYPE_HIF8: case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2: case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 16;
  }
}

struct Bf16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  Bf16& operator=(float value) {  // to the nearest, ties to even
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = value != value ? 0x7FC0 : static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
    return *this;
  }
};

template <class Number, class Wide>
void reduce_as(char* into, const char* from, uint64_t count, HcclReduceOp op) {
  auto* a = reinterpret_cast<Number*>(into);
  const auto* b = reinterpret_cast<const Number*>(from);
  for (uint64_t i = 0; i < count; i++) {
    const Wide x = a[i];
    const Wide y = b[i];
    switch (op) {
      case HCCL_REDUCE_SUM: a[i] = x + y; break;
      case HCCL_REDUCE_PROD: a[i] = x * y; break;
      case HCCL_REDUCE_MAX: a[i] = x > y || x != x ? x : y; break;
      default: a[i] = x < y || x != x ? x : y; break;
    }
  }
}

// The types that HCCL reduces; it does not reduce fp64.
HcclResult reduce(char* into, const char* from, uint64_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: reduce_as<int8_t, int8_t>(into, from, count, op); break;
    case HCCL_DATA_TYPE_INT16: reduce_as<int16_t, int16_t>(into, from, count, op); break;
    case HCCL_DATA_TYPE_INT32: reduce_as<int32_t, int32_t>(into, from, count, op); break;
    case HCCL_DATA_TYPE_INT64: reduce_as<int64_t, int64_t>(into, from, count, op); break;
    case HCCL_DATA_TYPE_FP16: reduce_as<_Float16, float>(into, from, count, op); break;
    case HCCL_DATA_TYPE_FP32: reduce_as<float, float>(into, from, count, op); break;
    case HCCL_DATA_TYPE_BFP16: reduce_as<Bf16, float>(into, from, count, op); break;
    default:
      std::fprintf(stderr, "fake HCCL: no reduction of data type %d\n", static_cast<int>(type));
      return HCCL_E_NOT_SUPPORT;
  }
  return HCCL_SUCCESS;
}

// Every rank's share of `count` numbers, summed in the order of the ranks, so that all ranks get the same bits.
HcclResult reduced(Communicator& all, const char* own, char* out, uint64_t count, HcclDataType type, HcclReduceOp op) {
  const uint64_t bytes = count * width(type);
  Bytes sum;
  Bytes next(bytes);
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank == all.rank) {
      next.assign(own, own + bytes);
    } else if (const HcclResult error = all.receive(rank, next.data(), bytes)) {
      return error;
    }
    if (rank == 0) {
      sum = next;
    } else if (const HcclResult error = reduce(sum.data(), next.data(), count, type, op)) {
      return error;
    }
  }
  std::memcpy(out, sum.data(), bytes);
  return HCCL_SUCCESS;
}

Communicator& of(HcclComm comm) { return *static_cast<Communicator*>(comm); }

// What every rank sends to every other, by byte offsets and sizes; its own share is copied.
HcclResult exchange(Communicator& all, const char* out, const std::vector<uint64_t>& starts,
                    const std::vector<uint64_t>& sizes, char* in, const std::vector<uint64_t>& targets,
                    const std::vector<uint64_t>& awaited) {
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank != all.rank) all.send(rank, out + starts[rank], sizes[rank]);
  }
  if (sizes[all.rank] != awaited[all.rank]) return HCCL_E_PARA;
  std::memmove(in + targets[all.rank], out + starts[all.rank], sizes[all.rank]);
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank == all.rank) continue;
    if (const HcclResult error = all.receive(rank, in + targets[rank], awaited[rank])) return error;
  }
  return HCCL_SUCCESS;
}

std::vector<uint64_t> scaled(const void* numbers, uint32_t count, uint64_t by) {
  const auto* from = static_cast<const uint64_t*>(numbers);
  std::vector<uint64_t> found(from, from + count);
  for (uint64_t& number : found) number *= by;
  return found;
}

std::vector<uint64_t> multiples(uint32_t count, uint64_t step) {
  std::vector<uint64_t> found(count);
  for (uint32_t i = 0; i < count; i++) found[i] = i * step;
  return found;
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> count{0};
  std::memset(info->internal, 0, sizeof info->internal);
  const long long now = Clock::now().time_since_epoch().count();
  std::snprintf(info->internal, 64, "fake-hccl-%d-%d-%llx", getpid(), count++, now);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  auto made = std::make_unique<Communicator>();
  made->id = info->internal;
  made->size = size;
  made->rank = rank;
  if (const HcclResult error = made->connect_all()) return error;
  *comm = made.release();
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* comm) {
  return HcclCommInitRootInfo(size, info, rank, comm);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  delete static_cast<Communicator*>(comm);
  return HCCL_SUCCESS;
}

uint32_t HcclGetCommConfigCapability() { return 0; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult) { return "fake HCCL: what went wrong is on stderr"; }
HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", of(comm).id.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
  *size = of(comm).size;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = of(comm).rank;
  return HCCL_SUCCESS;
}

HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream) {
  of(comm).send(to, data, count * width(type));
  return HCCL_SUCCESS;
}

HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream) {
  return of(comm).receive(from, data, count * width(type));
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  for (uint32_t i = 0; i < count; i++) {
    const HcclSendRecvItem& item = items[i];
    if (item.sendRecvType == HCCL_SEND) HcclSend(item.buf, item.count, item.dataType, item.remoteRank, comm, stream);
  }
  for (uint32_t i = 0; i < count; i++) {
    const HcclSendRecvItem& item = items[i];
    if (item.sendRecvType != HCCL_RECV) continue;
    if (const HcclResult error = HcclRecv(item.buf, item.count, item.dataType, item.remoteRank, comm, stream)) {
      return error;
    }
  }
  return HCCL_SUCCESS;
}

HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream) {
  Communicator& all = of(comm);
  if (all.rank != root) return all.receive(root, data, count * width(type));
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank != root) all.send(rank, data, count * width(type));
  }
  return HCCL_SUCCESS;
}

HcclResult HcclScatter(void* in, void* out, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream) {
  Communicator& all = of(comm);
  const uint64_t bytes = count * width(type);
  if (all.rank != root) return all.receive(root, out, bytes);
  const char* from = static_cast<char*>(in);
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank != root) all.send(rank, from + rank * bytes, bytes);
  }
  std::memmove(out, from + root * bytes, bytes);
  return HCCL_SUCCESS;
}

HcclResult HcclAllGather(void* in, void* out, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream) {
  Communicator& all = of(comm);
  const uint64_t bytes = count * width(type);
  const std::vector<uint64_t> same(all.size, bytes);
  return exchange(all, static_cast<char*>(in), multiples(all.size, 0), same, static_cast<char*>(out),
                  multiples(all.size, bytes), same);
}

HcclResult HcclAlltoAll(const void* in, uint64_t count, HcclDataType type, const void* out, uint64_t awaited,
                        HcclDataType awaited_type, HcclComm comm, aclrtStream) {
  Communicator& all = of(comm);
  const uint64_t bytes = count * width(type);
  const uint64_t room = awaited * width(awaited_type);
  return exchange(all, static_cast<const char*>(in), multiples(all.size, bytes), std::vector<uint64_t>(all.size, bytes),
                  static_cast<char*>(const_cast<void*>(out)), multiples(all.size, room),
                  std::vector<uint64_t>(all.size, room));
}

HcclResult HcclAlltoAllV(const void* in, const void* counts, const void* starts, HcclDataType type, const void* out,
                         const void* awaited, const void* targets, HcclDataType awaited_type, HcclComm comm,
                         aclrtStream) {
  Communicator& all = of(comm);
  const uint64_t wide = width(type);
  const uint64_t awaited_wide = width(awaited_type);
  return exchange(all, static_cast<const char*>(in), scaled(starts, all.size, wide), scaled(counts, all.size, wide),
                  static_cast<char*>(const_cast<void*>(out)), scaled(targets, all.size, awaited_wide),
                  scaled(awaited, all.size, awaited_wide));
}

HcclResult HcclAllReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream) {
  Communicator& all = of(comm);
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank != all.rank) all.send(rank, in, count * width(type));
  }
  return reduced(all, static_cast<char*>(in), static_cast<char*>(out), count, type, op);
}

HcclResult HcclReduceScatter(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream) {
  Communicator& all = of(comm);
  const uint64_t bytes = count * width(type);
  const char* from = static_cast<char*>(in);
  for (uint32_t rank = 0; rank < all.size; rank++) {
    if (rank != all.rank) all.send(rank, from + rank * bytes, bytes);
  }
  return reduced(all, from + all.rank * bytes, static_cast<char*>(out), count, type, op);
}

HcclResult HcclReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream) {
  Communicator& all = of(comm);
  if (all.rank == root) return reduced(all, static_cast<char*>(in), static_cast<char*>(out), count, type, op);
  all.send(root, in, count * width(type));
  return HCCL_SUCCESS;
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  char own = 0;
  std::vector<char> all(of(comm).size);
  return HcclAllGather(&own, all.data(), 1, HCCL_DATA_TYPE_INT8, comm, stream);
}
}
