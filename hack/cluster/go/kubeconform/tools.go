//go:build tools

// Package tools names the program that hack/cluster builds from this module.
package tools

import _ "github.com/yannh/kubeconform/cmd/kubeconform"
