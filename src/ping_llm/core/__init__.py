"""What every layer builds on: measurements, RTT distributions, random draws, compiled kernels, atomic files, errors."""
