// Reads torch's tensors where they are in memory, since calls of torch would take most of the time of a call with many.
//
// The layout of these objects is not documented. Described is that of torch 2.11 to 2.14; `trust` compares it with what
// torch's functions return. If anything differs, nothing is read in this way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "arrays.hpp"

struct TorchStorage { // the beginning of c10::StorageImpl
    void *methods;
    uint64_t references;
    char *data;
    void *context, *deleter;
    uint64_t device;
    int64_t nbytes;
    uint8_t is_nbytes_elsewhere, is_resizable, is_received;
    uint8_t checks[4]; // not zeros: torch does more than to return `data`, for example for a lazy clone
};

struct TorchVersion { // c10::VariableVersion::VersionCounter
    void *methods;
    uint64_t references;
    std::atomic<uint32_t> count;
};

struct TorchImpl { // the beginning of c10::TensorImpl
    void *methods;
    uint64_t references;
    TorchStorage *storage;
    void *autograd, *extra;
    TorchVersion *version;
};

struct TorchSizes { // the rest, which follows one or two words that refer to the PyObject
    int64_t axes;
    int64_t sizes[5], strides[5]; // elsewhere if there are more axes
    int64_t offset, elements;
    uint16_t dtype;
    int8_t device_type, device;
    uint8_t has_device, flags[3];
    uint64_t keys; // the cases that torch's dispatcher distinguishes: negated, conjugated, inference, kind of device, ...
};

struct TensorFacts { // what torch's functions return for a tensor
    const void *impl, *storage;
    int64_t offset, elements, version, storage_nbytes;
};

class TensorReader {
  public:
    bool is_trusted() const { return rest_ != 0; }

    // Compare the layout of a tensor, which torch's functions described as a view, with facts. Return whether it is as expected.
    bool trust(PyObject *tensor, const ArrayView &view, const TensorFacts &facts) {
        const TorchImpl &impl = *of(tensor);
        if (&impl != facts.impl || impl.storage != facts.storage) return false;
        const auto rest = static_cast<size_t>(reinterpret_cast<const char *>(view.sizes) - reinterpret_cast<const char *>(&impl)) -
                          offsetof(TorchSizes, sizes);
        if ((rest_ != 0 && rest != rest_) || (rest != sizeof(TorchImpl) + 8 && rest != sizeof(TorchImpl) + 16)) return false;
        rest_ = rest, methods_ = impl.methods;
        const TorchSizes &sizes = rest_of(impl);
        return impl.version != nullptr && impl.version->count == facts.version && sizes.axes == view.axes &&
               sizes.offset == facts.offset && sizes.elements == facts.elements && sizes.device_type == 0 &&
               sizes.has_device == 1 && impl.storage->nbytes == facts.storage_nbytes;
    }
    void distrust() {
        rest_ = 0;
        for (auto &dtype : dtypes_) dtype = 0;
        for (Kind &kind : kinds_) kind.keys = kind.keys_of_inferred = 0;
    }

    // Read what a later call of these functions or of `read` needs, one after another, so that it need not wait for memory.
    void prefetch(PyObject *tensor) const { __builtin_prefetch(tensor); }
    void prefetch_impl(PyObject *tensor) const {
        const auto *impl = reinterpret_cast<const char *>(of(tensor));
        for (const size_t at : {0, 64, 128}) __builtin_prefetch(impl + at);
    }
    void prefetch_storage(PyObject *tensor, bool written) const {
        const TorchImpl &impl = *of(tensor);
        __builtin_prefetch(impl.storage);
        __builtin_prefetch(reinterpret_cast<const char *>(impl.storage) + offsetof(TorchStorage, checks));
        if (written && impl.version != nullptr) __builtin_prefetch(&impl.version->count, 1);
    }

    // Describe a tensor of exactly torch's class in C order, if a tensor of the same dtype and one on the same kind of device
    // were accepted before. `may_need_grad` is set if only torch can tell whether it needs a gradient.
    bool read(PyObject *tensor, ArrayView &to, bool &may_need_grad, int32_t cuda_type) const {
        const TorchImpl &impl = *of(tensor);
        const TorchSizes &rest = rest_of(impl);
        if (impl.methods != methods_ || impl.extra != nullptr || rest.axes > 5 || !has_place(rest)) return false;
        const Kind &kind = kinds_[rest.device_type];
        const uint32_t dtype = dtypes_[rest.dtype].load(std::memory_order_relaxed);
        const auto &keys = is_inferred(tensor) ? kind.keys_of_inferred : kind.keys;
        if (dtype == 0 || rest.keys == 0 || rest.keys != keys.load(std::memory_order_relaxed)) return false;
        const bool on_cuda = kind.type.load(std::memory_order_relaxed) == cuda_type;
        to = {nullptr, rest.sizes, static_cast<int>(rest.axes), dtype, on_cuda ? std::max<int>(rest.device, 0) : HOST};
        may_need_grad = impl.autograd != nullptr;
        int64_t step = 1;
        bool contiguous = true;
        for (int64_t axis = rest.axes - 1; axis >= 0; axis--) {
            contiguous = contiguous && (rest.sizes[axis] == 1 || rest.strides[axis] == step);
            step *= rest.sizes[axis];
        }
        if (step == 0) return true; // empty
        if (impl.storage == nullptr) return false;
        const TorchStorage &storage = *impl.storage;
        const int64_t itemsize = dtype >> 11; // bits / 8
        uint32_t checks;
        std::memcpy(&checks, storage.checks, sizeof checks);
        if (!contiguous || checks != 0 || storage.is_nbytes_elsewhere || storage.data == nullptr ||
            (rest.offset + step) * itemsize > storage.nbytes)
            return false;
        to.data = storage.data + rest.offset * itemsize;
        return true;
    }

    // Note the dtype and the kind of device of a tensor that has passed all checks of torch's functions; those of DLPack.
    void accept(PyObject *tensor, int64_t dtype, int32_t device_type) {
        const TorchImpl &impl = *of(tensor);
        const TorchSizes &rest = rest_of(impl);
        if (impl.methods != methods_ || !has_place(rest)) return;
        dtypes_[rest.dtype].store(static_cast<uint32_t>(dtype), std::memory_order_relaxed);
        kinds_[rest.device_type].type.store(device_type, std::memory_order_relaxed);
        Kind &kind = kinds_[rest.device_type];
        (is_inferred(tensor) ? kind.keys_of_inferred : kind.keys).store(rest.keys, std::memory_order_relaxed);
    }

    // Whether a tensor that `read` or `accept` accepts was made in inference mode: autograd does not count writes into it.
    bool is_inferred(PyObject *tensor) const { return of(tensor)->version == nullptr; }

    // Whether it is known that the memory of a tensor, which has elements, was freed.
    bool is_freed(PyObject *tensor) const {
        const TorchImpl &impl = *of(tensor);
        return is_trusted() && impl.methods == methods_ && impl.storage != nullptr && impl.storage->data == nullptr;
    }

    // Count a write into a tensor, for autograd.
    void count_write(PyObject *tensor) const {
        if (!is_inferred(tensor)) of(tensor)->version->count.fetch_add(1, std::memory_order_relaxed);
    }

  private:
    static constexpr size_t MAX_DTYPES = 64, MAX_DEVICE_TYPES = 32;
    struct Kind { // of devices: the number of DLPack, and the keys of tensors that are neither negated nor conjugated, ...
        std::atomic<int32_t> type{0};
        std::atomic<uint64_t> keys{0}, keys_of_inferred{0}; // the latter of tensors that were made in inference mode
    };
    struct Object { // torch's THPVariable
        PyObject_HEAD
        const TorchImpl *impl;
    };
    size_t rest_ = 0;         // bytes before TorchSizes; 0: the layout is unknown
    void *methods_ = nullptr; // of dense tensors
    std::atomic<uint32_t> dtypes_[MAX_DTYPES] = {}; // bits << 8 | code of DLPack; 0: unknown
    Kind kinds_[MAX_DEVICE_TYPES];

    static const TorchImpl *of(PyObject *tensor) { return reinterpret_cast<const Object *>(tensor)->impl; }
    const TorchSizes &rest_of(const TorchImpl &impl) const {
        return *reinterpret_cast<const TorchSizes *>(reinterpret_cast<const char *>(&impl) + rest_);
    }
    static bool has_place(const TorchSizes &rest) {
        return rest.dtype < MAX_DTYPES && static_cast<uint8_t>(rest.device_type) < MAX_DEVICE_TYPES && rest.has_device;
    }
};
