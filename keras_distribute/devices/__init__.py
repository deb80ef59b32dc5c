"""Device names, meshes, placements, and programs on their way to the devices."""
