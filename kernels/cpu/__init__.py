"""The operations in C++: compiled on first use, called through ctypes. Nothing is compiled or loaded at import."""
