"""Where model states rest when nobody uses them: the device, the host, or a scratch file on NVMe."""
