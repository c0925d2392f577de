"""One name per operation; `dispatch` picks the implementation for the device at hand."""
