"""The synchronous core: catalog, hub and delivery, without I/O."""
