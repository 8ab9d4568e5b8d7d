// PyTorch's tensors in the compiled call path, through the C functions that torch 2.10 and newer offer to exchange
// tensors without Python calls (DLPack 1.2, DLPackExchangeAPI in dlpack.h; declared here are the parts in use).
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tensor_reader.hpp"

namespace {

struct DLVersion {
    uint32_t major, minor;
};
struct DLTensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; // strides in elements; null: C order
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLVersion version;
    void *context;
    void (*deleter)(DLManagedTensor *);
    uint64_t flags;
    DLTensor tensor;
};
struct ExchangeApi {
    DLVersion version;
    void *previous;
    void *allocate;
    int (*from_object)(void *, DLManagedTensor **);
    int (*to_object)(DLManagedTensor *, void **);
    int (*view)(void *, DLTensor *);
    int (*stream)(int32_t, int32_t, void **);
};
constexpr uint32_t VERSION = 1;
constexpr int32_t CPU = 1; // DLDeviceType
constexpr uint8_t INT = 0, UINT = 1, COMPLEX = 5; // DLDataTypeCode

// The DLDeviceType of CUDA; in tests, that of the CPU, whose memory then counts as that of cuda:0.
int32_t cuda_type = 2;

const ExchangeApi *api = nullptr;
PyTypeObject *tensor_type = nullptr;
PyObject *is_transformed = nullptr, *mark_dirty = nullptr, *empty_like = nullptr, *is_inference_mode = nullptr;
// On CUDA devices: is_filled(); block(like, nbytes); reinterpret(block, sizes, strides, offset); scratch(nbytes, device), which
// returns an owner and an address. Null: not set.
PyObject *is_filled = nullptr, *new_block = nullptr, *reinterpret = nullptr, *new_scratch = nullptr;
size_t block_alignment = 1;
PyObject *requires_grad = nullptr, *dtype_name = nullptr;                // names of attributes
PyObject *byte_dtypes[2];                                                // torch.int8 and torch.uint8
PyObject *is_neg = nullptr, *is_conj = nullptr, *is_inference = nullptr; // methods of the class, called with a tensor
TensorReader reader;

struct Block { // a result's memory and its description; both are freed with the tensor
    DLManagedTensor managed;
    size_t nbytes;
    int64_t sizes[2 * MAX_AXES]; // and strides
};

// Whether a tensor with elements has no memory, or seems to have none. The address of a part of a storage whose memory was
// freed is the part's offset; memory of the host or of a CUDA device is never at addresses that are so low.
bool lacks_memory(PyObject *object, const DLTensor &tensor) {
    const auto lowest = uint64_t{1} << (tensor.device.type == CPU ? 22 : 32);
    return reader.is_freed(object) || reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset < lowest;
}

void describe(const DLTensor &from, ArrayView &to) {
    to = {static_cast<char *>(from.data) + from.byte_offset, from.shape, from.ndim, from.dtype.code | from.dtype.bits << 8,
          from.device.type == cuda_type ? from.device.id : HOST};
}

void free_block(DLManagedTensor *managed) {
    auto *block = static_cast<Block *>(managed->context);
    if (block->nbytes >= POOLED_NBYTES) kernel_api->free(managed->tensor.data, block->nbytes);
    else std::free(managed->tensor.data);
    delete block;
}

bool needs_grad(PyObject *object) {
    Ref found(PyObject_GetAttr(object, requires_grad));
    return found.object != Py_False;
}

// Whether this thread is in inference mode: only then may it write into tensors that were made in such a mode.
bool is_inferring() {
    Ref found(PyObject_CallNoArgs(is_inference_mode));
    return found.object == Py_True;
}

bool is_false(PyObject *method, PyObject *object) {
    Ref found(PyObject_CallFunctionObjArgs(method, object, nullptr));
    return found.object == Py_False;
}

// Return whether a tensor of bytes has integers of fewer bits, such as those of torch.uint4, which DLPack does not tell.
bool has_short_integers(PyObject *object, uint8_t code) {
    Ref found(PyObject_GetAttr(object, dtype_name));
    return found.object != byte_dtypes[code];
}

class TorchAccess final : public ArrayAccess {
  public:
    bool view(PyObject *object, bool written, ArrayView &to) const override {
        if (Py_TYPE(object) != tensor_type) return false;
        bool may_need_grad = false;
        if (reader.is_trusted() && reader.read(object, to, may_need_grad, cuda_type))
            return (!may_need_grad || !needs_grad(object)) && (!written || !reader.is_inferred(object) || is_inferring());
        return view_by_torch(object, written, to);
    }

    bool view_all(const std::vector<PyObject *> &objects, bool written, std::vector<ArrayView> &to) const override {
        if (!reader.is_trusted()) return ArrayAccess::view_all(objects, written, to);
        constexpr size_t STEP = 16; // tensors between the steps of a prefetch
        const size_t count = objects.size();
        to.resize(count);
        const auto is_tensor = [&](size_t k) { return k < count && Py_TYPE(objects[k]) == tensor_type; };
        for (size_t k = 0; k < count + 3 * STEP; k++) { // the tensor k - 3 * STEP is viewed
            if (k < count) reader.prefetch(objects[k]);
            if (k >= STEP && is_tensor(k - STEP)) reader.prefetch_impl(objects[k - STEP]);
            if (k >= 2 * STEP && is_tensor(k - 2 * STEP)) reader.prefetch_storage(objects[k - 2 * STEP], written);
            if (k >= 3 * STEP && !view(objects[k - 3 * STEP], written, to[k - 3 * STEP])) return false;
        }
        return true;
    }

    // Do what `view` does, with torch's functions.
    bool view_by_torch(PyObject *object, bool written, ArrayView &to) const {
        DLTensor found;
        if (needs_grad(object) || api->view(object, &found) != 0) return false;
        if ((found.device.type != cuda_type && found.device.type != CPU) || found.ndim > MAX_AXES || found.dtype.lanes != 1) return false;
        int64_t step = 1;
        bool contiguous = true, empty = false;
        for (int axis = found.ndim - 1; axis >= 0; axis--) {
            contiguous = contiguous && (found.shape[axis] == 1 || found.strides == nullptr || found.strides[axis] == step);
            empty = empty || found.shape[axis] == 0;
            step *= found.shape[axis];
        }
        if (!(contiguous || empty) || (!empty && lacks_memory(object, found))) return false;
        if (found.dtype.bits == 8 && found.dtype.code <= UINT && has_short_integers(object, found.dtype.code)) return false;
        if (!is_false(is_neg, object) || (found.dtype.code == COMPLEX && !is_false(is_conj, object))) return false;
        if (written && !is_false(is_inference, object) && !is_inferring()) return false;
        describe(found, to);
        if (reader.is_trusted()) reader.accept(object, to.dtype, found.device.type);
        return true;
    }

    PyObject *make(const ArrayView &like, int64_t dtype, size_t itemsize, char **data) const override {
        auto *block = new Block;
        DLTensor &tensor = block->managed.tensor;
        block->managed = {{VERSION, 0}, block, free_block, 0, {}};
        block->nbytes = itemsize;
        int64_t step = 1;
        for (int axis = like.axes - 1; axis >= 0; axis--) {
            block->sizes[axis] = like.sizes[axis];
            block->sizes[MAX_AXES + axis] = step;
            block->nbytes *= static_cast<size_t>(like.sizes[axis]);
            step *= std::max<int64_t>(like.sizes[axis], 1); // as torch does for empty tensors
        }
        void *memory = nullptr;
        if (block->nbytes >= POOLED_NBYTES) memory = kernel_api->allocate(block->nbytes);
        else if (posix_memalign(&memory, LINE, block->nbytes + (block->nbytes == 0)) != 0) memory = nullptr;
        if (memory == nullptr) {
            delete block;
            return PyErr_NoMemory();
        }
        tensor.data = memory;
        tensor.device = {CPU, 0};
        tensor.ndim = like.axes;
        tensor.dtype = {static_cast<uint8_t>(dtype & 0xff), static_cast<uint8_t>(dtype >> 8), 1};
        tensor.shape = block->sizes;
        tensor.strides = block->sizes + MAX_AXES;
        tensor.byte_offset = 0;
        *data = static_cast<char *>(memory);
        void *made = nullptr;
        if (api->to_object(&block->managed, &made) != 0) {
            free_block(&block->managed);
            return nullptr;
        }
        return static_cast<PyObject *>(made);
    }

    // torch's own function, since Tensor.record_stream has no effect on a tensor that was made by DLPack.
    PyObject *make_like(PyObject *array, char **data) const override {
        Ref made(PyObject_CallFunctionObjArgs(empty_like, array, nullptr));
        DLTensor found;
        if (!made || api->view(made.object, &found) != 0) return nullptr;
        *data = static_cast<char *>(found.data) + found.byte_offset;
        Py_INCREF(made.object);
        return made.object;
    }

    bool prefers_blocks() const override {
        Ref found(is_filled != nullptr ? PyObject_CallFunctionObjArgs(is_filled, nullptr) : nullptr);
        return found.object == Py_True;
    }

    size_t alignment() const override { return block_alignment; }

    PyObject *make_block(PyObject *like, size_t nbytes, char **data) const override {
        Ref size(PyLong_FromSize_t(nbytes));
        Ref made(size ? PyObject_CallFunctionObjArgs(new_block, like, size.object, nullptr) : nullptr);
        DLTensor found;
        if (!made || api->view(made.object, &found) != 0) return nullptr;
        *data = static_cast<char *>(found.data) + found.byte_offset;
        Py_INCREF(made.object);
        return made.object;
    }

    PyObject *make_in(PyObject *block, PyObject *sizes, PyObject *strides, size_t offset) const override {
        Ref at(PyLong_FromSize_t(offset));
        return at ? PyObject_CallFunctionObjArgs(reinterpret, block, sizes, strides, at.object, nullptr) : nullptr;
    }

    TemporaryMemory temporary(int device, int64_t nbytes) const override {
        Ref made(PyObject_CallFunction(new_scratch, "Li", static_cast<long long>(nbytes), device));
        PyObject *owner;
        unsigned long long address;
        if (!made || !PyArg_ParseTuple(made.object, "OK", &owner, &address)) return nullptr;
        Py_INCREF(owner);
        return {reinterpret_cast<void *>(address), [owner](void *) { Py_DECREF(owner); }};
    }

    bool stream(int device, uint64_t &found) const override {
        void *current = nullptr;
        if (api->stream(cuda_type, device, &current) != 0) return false;
        found = reinterpret_cast<uint64_t>(current);
        return true;
    }

    bool is_usable() const override {
        Ref found(PyObject_CallFunctionObjArgs(is_transformed, nullptr));
        return found.object == Py_False;
    }

    bool mark_written(const std::vector<PyObject *> &arrays) const override {
        if (reader.is_trusted()) {
            for (PyObject *array : arrays) reader.count_write(array);
            return true;
        }
        Ref tuple(tuple_of(arrays)), done(tuple ? PyObject_CallFunctionObjArgs(mark_dirty, tuple.object, nullptr) : nullptr);
        return static_cast<bool>(done);
    }
};

const TorchAccess tensors;

// Compare the layout of tensors with what torch's functions return. `plain`: tuples of a tensor and the fields of TensorFacts;
// `special`: tensors that must not be read without torch's functions.
bool is_layout_known(PyObject *plain, PyObject *special) {
    const bool is_expected = read_each(plain, [](PyObject *facts) {
        PyObject *tensor;
        long long impl, storage, offset, elements, version, nbytes;
        ArrayView view;
        if (!PyArg_ParseTuple(facts, "OLLLLLL", &tensor, &impl, &storage, &offset, &elements, &version, &nbytes) ||
            Py_TYPE(tensor) != tensor_type || !tensors.view_by_torch(tensor, true, view))
            return false;
        const auto *at = reinterpret_cast<const void *>(impl), *memory = reinterpret_cast<const void *>(storage);
        return reader.trust(tensor, view, {at, memory, offset, elements, version, nbytes});
    });
    const auto reads = [](PyObject *tensor, ArrayView &to) {
        bool may_need_grad = false;
        return Py_TYPE(tensor) == tensor_type && reader.read(tensor, to, may_need_grad, cuda_type) && !may_need_grad;
    };
    return is_expected && read_each(plain, [&](PyObject *facts) {
        PyObject *tensor = PyTuple_GetItem(facts, 0);
        ArrayView view, other;
        bool may_need_grad = false;
        return tensors.view_by_torch(tensor, true, view) && reader.read(tensor, other, may_need_grad, cuda_type) &&
               view.data == other.data && view.dtype == other.dtype && view.device == other.device;
    }) && read_each(special, [&](PyObject *tensor) {
        ArrayView unused;
        return !reads(tensor, unused);
    });
}

} // namespace

PyObject *use_torch(PyObject *, PyObject *args) {
    PyObject *type, *capsule, *transformed, *written, *like, *inferring, *int8, *uint8;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &type, &capsule, &transformed, &written, &like, &inferring, &int8, &uint8)) return nullptr;
    const auto *found = static_cast<const ExchangeApi *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (found == nullptr) return nullptr;
    if (tensor_type != nullptr || found->version.major != VERSION || found->view == nullptr) Py_RETURN_NONE;
    requires_grad = PyUnicode_InternFromString("requires_grad");
    dtype_name = PyUnicode_InternFromString("dtype");
    is_neg = PyObject_GetAttrString(type, "is_neg");
    is_conj = PyObject_GetAttrString(type, "is_conj");
    is_inference = PyObject_GetAttrString(type, "is_inference");
    if (!requires_grad || !dtype_name || !is_neg || !is_conj || !is_inference) return nullptr;
    for (PyObject *kept : {type, transformed, written, like, inferring, int8, uint8}) Py_INCREF(kept);
    byte_dtypes[INT] = int8, byte_dtypes[UINT] = uint8;
    is_transformed = transformed, mark_dirty = written, empty_like = like, is_inference_mode = inferring, api = found;
    tensor_type = reinterpret_cast<PyTypeObject *>(type);
    Py_RETURN_NONE;
}

PyObject *use_torch_layout(PyObject *, PyObject *args) {
    PyObject *plain, *special;
    if (!PyArg_ParseTuple(args, "OO", &plain, &special)) return nullptr;
    reader.distrust();
    const bool is_known = tensor_type != nullptr && is_layout_known(plain, special) && reader.is_trusted();
    if (!is_known) reader.distrust();
    PyErr_Clear();
    return PyBool_FromLong(is_known);
}

PyObject *use_torch_devices(PyObject *, PyObject *args) {
    Py_ssize_t alignment;
    if (!PyArg_ParseTuple(args, "OOOOn", &is_filled, &new_block, &reinterpret, &new_scratch, &alignment)) return nullptr;
    block_alignment = static_cast<size_t>(alignment);
    for (PyObject *kept : {is_filled, new_block, reinterpret, new_scratch}) Py_INCREF(kept); // for ever
    Py_RETURN_NONE;
}

PyObject *use_device_type(PyObject *, PyObject *number) {
    const long type = PyLong_AsLong(number);
    if (type == -1 && PyErr_Occurred()) return nullptr;
    cuda_type = static_cast<int32_t>(type);
    Py_RETURN_NONE;
}

const ArrayAccess *torch_access(PyObject *array) {
    return tensor_type != nullptr && Py_TYPE(array) == tensor_type ? &tensors : nullptr;
}
