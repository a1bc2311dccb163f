#!/bin/sh
# In the nested machine, what a distribution's udev does on a host: the devices are there and open to whom they should be.
set -e
modprobe -a kvm_amd tun
chgrp 36 /dev/kvm && chmod 660 /dev/kvm
chmod 666 /dev/net/tun
echo "seen: $(/disk/firecracker/firecracker --version | head -n 1)"
