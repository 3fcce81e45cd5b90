"""The machine's topology, and plans that give actors cores, memory and devices."""
