"""The operations in C++, compiled on first use and called through ctypes. Importing compiles and loads nothing."""
