"""One module per part of the library: what it costs on this machine (``dpfl bench``)."""
