//! The exposure domain: strategy resolution, exposure plan, host names, addresses, NodePort allocation.
