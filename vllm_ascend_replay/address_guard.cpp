// The loop of `address_guard.AddressGuard`: PyTorch gives out no addresses in bulk, and a loop in Python takes ten times
// as long. Built at start-up against Python's headers only.

#include <Python.h>

#include <cstdint>

namespace {

using AddressOf = void *(*)(PyObject *);

// first_moved(stores, keys, types, addresses, address_of) -> int
//
// The first i for which stores[i][keys[i]] is gone, is no tensor of types[i] any more, or lies elsewhere than
// addresses[i] says; the number of stores if there is none.
//
// stores: tuple of dicts. keys: tuple of str. types: tuple of types. addresses: bytes of uint64s. All of one length,
// which the caller sees to. address_of: a pointer to PyTorch's own function, as an int.
PyObject *first_moved(PyObject *, PyObject *const *args, Py_ssize_t) {
  PyObject *stores = args[0], *keys = args[1], *types = args[2];
  const auto *addresses = reinterpret_cast<const uint64_t *>(PyBytes_AS_STRING(args[3]));
  const auto address_of = reinterpret_cast<AddressOf>(PyLong_AsVoidPtr(args[4]));
  const Py_ssize_t count = PyTuple_GET_SIZE(stores);
  Py_ssize_t i = 0;
  try {
    for (; i < count; ++i) {
      PyObject *tensor = PyDict_GetItem(PyTuple_GET_ITEM(stores, i), PyTuple_GET_ITEM(keys, i));
      if (tensor == nullptr || reinterpret_cast<PyObject *>(Py_TYPE(tensor)) != PyTuple_GET_ITEM(types, i)) break;
      if (reinterpret_cast<uint64_t>(address_of(tensor)) != addresses[i]) break;
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
