"""Programs of other frameworks: each folder makes a Recording of one."""
