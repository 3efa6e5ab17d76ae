"""Model states away from the device between uses: in host memory, or in a scratch file on NVMe."""
