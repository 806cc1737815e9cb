//go:build tools

// Package tools names the program that hack/cluster builds from this module.
package tools

import _ "sigs.k8s.io/cri-tools/cmd/crictl"
