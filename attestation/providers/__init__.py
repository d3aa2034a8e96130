"""Where evidence comes from: the kernel's configfs-tsm, its /dev/sev-guest, or the simulated PSP.

``base`` has the interfaces, ``select`` picks a provider by name.
"""
