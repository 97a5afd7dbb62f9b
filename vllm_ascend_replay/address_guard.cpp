// The loop of `address_guard.NativeWeights`: PyTorch gives out no addresses in bulk, and a loop in Python takes three
// times as long. Built at start-up against Python's headers only.

#include <Python.h>

#include <cstdint>

namespace {

using AddressOf = void *(*)(PyObject *);

// Addresses that an entry's check reads, asked for some entries ahead: a step in between took the caches, and most of a
// check would be waiting. Prefetching follows no address, so one that is out of date does no harm.
constexpr Py_ssize_t HINTS = 4;
constexpr Py_ssize_t AHEAD = 12;

// What container[key] is, borrowed; NULL if it is gone.
inline PyObject *look_up(PyObject *container, PyObject *key) {
  if (PyDict_CheckExact(container)) return PyDict_GetItem(container, key);
  const Py_ssize_t at = PyLong_AsSsize_t(key);
  if (PyList_CheckExact(container)) return at < PyList_GET_SIZE(container) ? PyList_GET_ITEM(container, at) : nullptr;
  if (PyTuple_CheckExact(container)) return at < PyTuple_GET_SIZE(container) ? PyTuple_GET_ITEM(container, at) : nullptr;
  return nullptr;
}

// first_moved(containers, keys, types, addresses, hints, address_of) -> int
//
// The first i for which containers[i][keys[i]] is gone, is no tensor of types[i] any more, or lies elsewhere than
// addresses[i] says; where types[i] is None, for which it is another object than the one at addresses[i]. The number of
// containers if there is none.
//
// containers: tuple of dicts, lists and tuples. keys: tuple of str and int. types: tuple of types and None. addresses:
// bytes of uint64s. hints: bytes of HINTS uint64s each.
// All of one length, which the caller sees to. address_of: a pointer to PyTorch's own function, as an int.
PyObject *first_moved(PyObject *, PyObject *const *args, Py_ssize_t) {
  PyObject *containers = args[0], *keys = args[1], *types = args[2];
  const auto *addresses = reinterpret_cast<const uint64_t *>(PyBytes_AS_STRING(args[3]));
  const auto *hints = reinterpret_cast<const uint64_t *>(PyBytes_AS_STRING(args[4]));
  const auto address_of = reinterpret_cast<AddressOf>(PyLong_AsVoidPtr(args[5]));
  const Py_ssize_t count = PyTuple_GET_SIZE(containers);
  Py_ssize_t i = 0;
  try {
    for (; i < count; ++i) {
      if (i + AHEAD < count)
        for (Py_ssize_t h = 0; h < HINTS; ++h)
          __builtin_prefetch(reinterpret_cast<const void *>(hints[(i + AHEAD) * HINTS + h]));
      PyObject *found = look_up(PyTuple_GET_ITEM(containers, i), PyTuple_GET_ITEM(keys, i));
      PyObject *type = PyTuple_GET_ITEM(types, i);
      if (found == nullptr) break;
      if (type == Py_None) {
        if (reinterpret_cast<uint64_t>(found) != addresses[i]) break;
        continue;
      }
      // Only a tensor may be asked for its address.
      if (reinterpret_cast<PyObject *>(Py_TYPE(found)) != type) break;
      if (reinterpret_cast<uint64_t>(address_of(found)) != addresses[i]) break;
    }
  } catch (...) {
    // A tensor without a storage has no address: it moved.
  }
  return PyLong_FromSsize_t(i);
}

PyMethodDef methods[] = {
    {"first_moved", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(first_moved)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "address_guard_native", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_address_guard_native() { return PyModule_Create(&definition); }
