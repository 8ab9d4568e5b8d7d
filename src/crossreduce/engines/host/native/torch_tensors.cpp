// PyTorch's tensors in the compiled call path, through the C functions that torch 2.10 and newer offer to exchange
// tensors without Python calls (DLPack 1.2, DLPackExchangeAPI in dlpack.h; declared here as far as they are used).
#include "arrays.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

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
    int (*allocate)(DLTensor *, DLManagedTensor **, void *, void (*)(void *, const char *, const char *));
    int (*from_object)(void *, DLManagedTensor **);
    int (*to_object)(DLManagedTensor *, void **);
    int (*view)(void *, DLTensor *);
    int (*stream)(int32_t, int32_t, void **);
};
constexpr uint32_t VERSION = 1;
constexpr int32_t CPU = 1;
constexpr uint8_t COMPLEX = 5;

const ExchangeApi *api = nullptr;
PyTypeObject *tensor_type = nullptr;
PyObject *is_transformed = nullptr, *mark_dirty = nullptr;
PyObject *requires_grad = nullptr, *is_neg = nullptr, *is_conj = nullptr, *is_inference = nullptr;

struct Block { // a result's memory and its description; both are freed with the tensor
    DLManagedTensor managed;
    size_t nbytes;
    int64_t sizes[2 * MAX_AXES]; // and strides
};

void free_block(DLManagedTensor *managed) {
    auto *block = static_cast<Block *>(managed->context);
    if (block->nbytes >= POOLED_NBYTES) kernel_api->free(managed->tensor.data, block->nbytes);
    else std::free(managed->tensor.data);
    delete block;
}

// Return whether an attribute, or the result of a method without arguments, is False.
bool is_false(PyObject *object, PyObject *name, bool method) {
    Ref found(method ? PyObject_CallMethodObjArgs(object, name, nullptr) : PyObject_GetAttr(object, name));
    return found.object == Py_False;
}

class TorchAccess final : public ArrayAccess {
  public:
    bool view(PyObject *object, bool written, ArrayView &to) const override {
        DLTensor found;
        if (Py_TYPE(object) != tensor_type || !is_false(object, requires_grad, false) || api->view(object, &found) != 0)
            return false;
        if (found.device.type != CPU || found.ndim > MAX_AXES || found.dtype.lanes != 1) return false;
        int64_t step = 1;
        bool contiguous = true, empty = false;
        for (int axis = found.ndim - 1; axis >= 0; axis--) {
            contiguous = contiguous && (found.shape[axis] == 1 || found.strides == nullptr || found.strides[axis] == step);
            empty = empty || found.shape[axis] == 0;
            step *= found.shape[axis];
        }
        if (!(contiguous || empty) || (found.data == nullptr && !empty)) return false;
        if (!is_false(object, is_neg, true) || (found.dtype.code == COMPLEX && !is_false(object, is_conj, true)))
            return false;
        if (written && !is_false(object, is_inference, true)) return false;
        to = {static_cast<char *>(found.data) + found.byte_offset, found.shape, found.ndim,
              found.dtype.code | found.dtype.bits << 8};
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

    bool is_usable() const override {
        Ref found(PyObject_CallFunctionObjArgs(is_transformed, nullptr));
        return found.object == Py_False;
    }

    bool mark_written(PyObject *arrays) const override {
        Ref done(PyObject_CallFunctionObjArgs(mark_dirty, arrays, nullptr));
        return static_cast<bool>(done);
    }
};

const TorchAccess tensors;

} // namespace

PyObject *use_torch(PyObject *, PyObject *args) {
    PyObject *type, *capsule, *transformed, *written;
    if (!PyArg_ParseTuple(args, "OOOO", &type, &capsule, &transformed, &written)) return nullptr;
    const auto *found = static_cast<const ExchangeApi *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (found == nullptr) return nullptr;
    if (tensor_type != nullptr || found->version.major != VERSION || found->view == nullptr) Py_RETURN_NONE;
    requires_grad = PyUnicode_InternFromString("requires_grad");
    is_neg = PyUnicode_InternFromString("is_neg");
    is_conj = PyUnicode_InternFromString("is_conj");
    is_inference = PyUnicode_InternFromString("is_inference");
    if (!requires_grad || !is_neg || !is_conj || !is_inference) return nullptr;
    for (PyObject *kept : {type, transformed, written}) Py_INCREF(kept);
    is_transformed = transformed, mark_dirty = written, api = found;
    tensor_type = reinterpret_cast<PyTypeObject *>(type);
    Py_RETURN_NONE;
}

const ArrayAccess *torch_access(PyObject *array) {
    return tensor_type != nullptr && Py_TYPE(array) == tensor_type ? &tensors : nullptr;
}
