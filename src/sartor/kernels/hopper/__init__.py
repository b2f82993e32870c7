"""The kernels for Hopper (sm_90a), in CUDA C++: a host file and a device file of one name for each."""
